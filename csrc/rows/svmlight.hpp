// Parsing of SVMlight text: on each line a label and entries `index:value`.
//
// A block ends with a newline, and every scan stops at newlines. So only the end of a line is
// compared with the end of the block.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/buffer.hpp"
#include "rows/decimals.hpp"

namespace sparcel {

// Says what is wrong with a line, which is counted from 0 in its block.
class MalformedLine : public std::runtime_error {
  public:
    MalformedLine(size_t line, const std::string& message)
        : std::runtime_error(message), line(line) {}
    const size_t line;
};

template <class Index>
struct SvmlightRows {
    size_t rows = 0, entries = 0;
    Buffer<int64_t> offsets;  // one more than rows
    Buffer<Index> columns;
    Buffer<float> values;
    Buffer<double> labels;  // NaN where a label is no finite number
    Buffer<int64_t> spans;  // where each label begins and ends in the block
};

template <class Index>
class SvmlightParser {
  public:
    // Indices go from `index_from`, 0 or 1, and columns from 0 to `dimensions` - 1.
    SvmlightParser(const char* block, size_t bytes, int64_t index_from, int64_t dimensions)
        : block_(block), end_(block + bytes), index_from_(index_from), dimensions_(dimensions) {}

    SvmlightRows<Index> run() {
        allocate();
        for (const char* at = block_; at != end_;) at = read_line(at);
        return std::move(found_);
    }

  private:
    static constexpr std::ptrdiff_t kMostIndexDigits = 18;  // which 63 bits hold
    static constexpr size_t kMostShown = 40;                // bytes of a token in a message

    static bool ends_line(char c) { return c == '\n' || c == '#'; }
    static bool ends_token(char c) { return uint8_t(c) <= ' ' || c == '#'; }

    static const char* skip_blanks(const char* at) {
        while (*at == ' ' || *at == '\t' || *at == '\r') ++at;
        return at;
    }

    static const char* token_end(const char* at) {
        while (!ends_token(*at)) ++at;
        return at;
    }

    // There are at most as many rows as lines, and as many entries as colons.
    void allocate() {
        const size_t lines = size_t(std::count(block_, end_, '\n'));
        const size_t colons = size_t(std::count(block_, end_, ':'));
        found_.offsets = Buffer<int64_t>(lines + 1);
        found_.labels = Buffer<double>(lines);
        found_.spans = Buffer<int64_t>(2 * lines);
        found_.columns = Buffer<Index>(colons);
        found_.values = Buffer<float>(colons);
        found_.offsets[0] = 0;
    }

    const char* read_line(const char* at) {
        at = skip_blanks(at);
        if (!ends_line(*at)) {
            at = read_entries(read_label(at));
            found_.offsets[++found_.rows] = int64_t(found_.entries);
        }
        if (*at == '#') at = static_cast<const char*>(std::memchr(at, '\n', size_t(end_ - at)));
        return at + 1;
    }

    const char* read_label(const char* label) {
        const char* const end = token_end(label);
        if (std::find(label, end, ':') != end) {
            refuse(label, "the line begins with ", ", not with a label");
        }
        double& number = found_.labels[found_.rows];
        if (read_decimal(label, end_, number) != end) {
            number = std::numeric_limits<double>::quiet_NaN();
        }
        found_.spans[2 * found_.rows] = label - block_;
        found_.spans[2 * found_.rows + 1] = end - block_;
        return end;
    }

    const char* read_entries(const char* at) {
        Index* column = found_.columns.data() + found_.entries;
        float* value = found_.values.data() + found_.entries;
        int64_t previous = -1;
        for (at = skip_blanks(at); !ends_line(*at); at = skip_blanks(at)) {
            const char* const token = at;
            uint64_t index = 0;
            at = read_digits(token, index);
            const int64_t current = int64_t(index - uint64_t(index_from_));
            if (*at != ':' || at == token || at - token > kMostIndexDigits || current <= previous ||
                current >= dimensions_) {
                refuse_index(token, previous);
            }
            // Most sparse data consist of ones, and of other small counts.
            if (is_digit(at[1]) && ends_token(at[2])) {
                *value = float(at[1] - '0');
                at += 2;
            } else {
                at = read_decimal(at + 1, end_, *value);
            }
            if (!at || !ends_token(*at)) {
                refuse(token, "the value in ", " is no finite number in float32");
            }
            *column++ = Index(current);
            ++value;
            previous = current;
        }
        found_.entries = size_t(value - found_.values.data());
        return at;
    }

    // Says what is wrong with a token up to its colon; the entry before it is in column `previous`.
    [[noreturn]] void refuse_index(const char* token, int64_t previous) const {
        uint64_t index = 0;
        const char* const end = read_digits(token, index);
        if (std::string_view(token, token_end(token)).starts_with("qid:")) {
            refuse(token, "", " names a query, but rows are fitted one by one: remove the qid");
        }
        if (end == token || *end != ':') refuse(token, "expected index:value, got ", "");
        if (end - token > kMostIndexDigits) refuse(token, "the index is too long in ", "");
        if (int64_t(index) < index_from_) {
            refuse(token, "indices begin with 1, got ",
                   ": read_svmlight takes index_from=0, sparcel linear fit --index-from 0");
        }
        const int64_t current = int64_t(index) - index_from_;
        if (current <= previous) {
            refuse(token, "indices must increase within a line, got ",
                   " after index " + std::to_string(previous + index_from_));
        }
        refuse(token, "",
               " needs dimensions=" + std::to_string(current + 1) + " or more, not " +
                   std::to_string(dimensions_));
    }

    [[noreturn]] void refuse(const char* token, const std::string& before,
                             const std::string& after) const {
        const size_t line = size_t(std::count(block_, token, '\n'));
        throw MalformedLine(line, before + shown(token) + after);
    }

    // The token in quotes, without what terminals may not show.
    static std::string shown(const char* token) {
        constexpr char kHex[] = "0123456789abcdef";
        const size_t length = size_t(token_end(token) - token);
        std::string text = "'";
        // A token that is one character, and ends tokens, is shown as well.
        for (const char c : std::string_view(token, std::clamp(length, size_t{1}, kMostShown))) {
            if (c >= ' ' && c <= '~') {
                text += c;
            } else {
                text += {'\\', 'x', kHex[uint8_t(c) >> 4], kHex[uint8_t(c) & 15]};
            }
        }
        return text + (length > kMostShown ? "...'" : "'");
    }

    const char* const block_;
    const char* const end_;
    const int64_t index_from_, dimensions_;
    SvmlightRows<Index> found_;
};

}  // namespace sparcel
