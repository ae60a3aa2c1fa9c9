// A batch of sparse rows, by columns.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/buffer.hpp"

namespace sparcel {

// Sparse rows as they are stored: row i has the entries offsets[i] to offsets[i + 1].
template <class Column, class Value>
struct Csr {
    const int64_t* offsets;
    const Column* columns;
    const Value* values;
};

// The most rows of a batch.
constexpr size_t kMostRows = 1 << 15;

// An entry's row, numbered within its batch, and whether it is the first of its column.
struct Place {
    uint16_t bits;

    static Place of(size_t row, bool first) { return {uint16_t(row | (first ? kMostRows : 0))}; }
    size_t row() const { return bits & (kMostRows - 1); }
    size_t first() const { return bits >> 15; }
};

// A batch: the columns that occur in it, and its entries column by column. A step of training then
// visits a coordinate of the model once, and what it adds up lies in the first-level cache.
template <class Column, class Value>
struct Columns {
    Column* columns;  // [columns], increasing
    Place* places;    // [entries], rows increasing in each column
    Value* values;    // [entries]
};

// Sorts the entries of a batch of rows by their columns. Memory is used again for the next batch.
template <class Column, class Value>
class ByColumns {
  public:
    // Takes the rows [first, last), and returns how many columns occur.
    size_t arrange(const Csr<Column, Value>& source, size_t first, size_t last,
                   const Columns<Column, Value>& batch) {
        const auto entries = size_t(source.offsets[last] - source.offsets[first]);
        reserve(entries);
        const uint64_t highest = copy(source, first, last);
        const Entry* sorted = sort(entries, std::bit_width(highest));
        return write(sorted, entries, batch);
    }

  private:
    struct Entry {
        Column column;
        uint32_t position;  // in the order of the rows
    };

    void reserve(size_t entries) {
        if (entries <= capacity_) return;
        capacity_ = entries;
        entries_ = Buffer<Entry>(entries);
        spare_ = Buffer<Entry>(entries);
        rows_ = Buffer<uint16_t>(entries);
        values_ = Buffer<Value>(entries);
    }

    // Copies the rows [first, last), and returns the highest column.
    uint64_t copy(const Csr<Column, Value>& source, size_t first, size_t last) {
        uint64_t highest = 0;
        uint32_t position = 0;
        for (size_t row = first; row < last; ++row) {
            for (int64_t at = source.offsets[row]; at < source.offsets[row + 1]; ++at, ++position) {
                entries_[position] = {source.columns[at], position};
                rows_[position] = uint16_t(row - first);
                values_[position] = source.values[at];
                highest = std::max(highest, uint64_t(source.columns[at]));
            }
        }
        return highest;
    }

    // A radix sort, digit by digit from the lowest; stable, so rows stay in order.
    const Entry* sort(size_t entries, int bits) {
        const int passes = (bits + kDigit - 1) / kDigit;
        Entry *from = entries_.data(), *to = spare_.data();
        for (int pass = 0; pass < passes; ++pass) {
            const int shift = pass * kDigit;
            std::array<uint32_t, (1 << kDigit) + 1> starts = {};
            for (size_t i = 0; i < entries; ++i) ++starts[digit(from[i].column, shift) + 1];
            for (size_t d = 1; d < starts.size(); ++d) starts[d] += starts[d - 1];
            for (size_t i = 0; i < entries; ++i)
                to[starts[digit(from[i].column, shift)]++] = from[i];
            std::swap(from, to);
        }
        return from;
    }

    size_t write(const Entry* sorted, size_t entries, const Columns<Column, Value>& batch) const {
        size_t count = 0;
        for (size_t i = 0; i < entries; ++i) {
            const bool first = i == 0 || sorted[i].column != sorted[i - 1].column;
            if (first) batch.columns[count++] = sorted[i].column;
            batch.places[i] = Place::of(rows_[sorted[i].position], first);
            batch.values[i] = values_[sorted[i].position];
        }
        return count;
    }

    static size_t digit(Column column, int shift) {
        return size_t(uint64_t(column) >> shift) & ((1 << kDigit) - 1);
    }

    static constexpr int kDigit = 11;

    size_t capacity_ = 0;
    Buffer<Entry> entries_, spare_;
    Buffer<uint16_t> rows_;
    Buffer<Value> values_;
};

}  // namespace sparcel
