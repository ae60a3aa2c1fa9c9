// Reduction of many sorted streams to one, in windows.
//
// The index space is processed in windows. In each, a bitmap marks the indices that occur, and
// counting its bits gives every index its slot in the result. Slots begin with the operation's
// identity, and values are reduced into them, stream by stream. So operations follow the order of
// the streams, the work is linear in the entries for any number of streams, and the bitmap is the
// only dense data.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "base/buffer.hpp"
#include "base/numbers.hpp"

namespace sparcel {

template <class Index, class Value>
struct StreamView {
    const Index* indices;
    const Value* values;  // rows of `width`
    size_t count;
};

// The result of a merge over a range of indices.
template <class Index, class Value>
struct Merged {
    Buffer<Index> indices;
    Buffer<Value> values;
    size_t count = 0;
};

namespace detail {

// The smallest window has 16 KiB of bits and 8 KiB of ranks, and fits the first level of the cache.
// The largest fits the second level.
constexpr size_t kSmallestWindow = size_t{1} << 17;
constexpr size_t kLargestWindow = size_t{1} << 20;

template <class Op, class Index, class Value>
class Merger {
  public:
    using View = StreamView<Index, Value>;
    using Sum = typename Wide<Value>::Type;

    Merger(std::span<const View> streams, size_t width)
        : streams_(streams),
          width_(width),
          cursors_(streams.size()),
          ends_(streams.size()),
          window_ends_(streams.size()) {}

    // Merges the indices in [begin, end).
    Merged<Index, Value> run(Index begin, Index end) {
        for (size_t s = 0; s < streams_.size(); ++s) cursors_[s] = lower_bound(streams_[s], begin);
        for (size_t s = 0; s < streams_.size(); ++s) ends_[s] = lower_bound(streams_[s], end);
        allocate();
        Merged<Index, Value> result;
        for (Index first = 0; next_index(first);) {
            // Each window begins at an index that occurs, so gaps cost nothing.
            collect(first);
            reduce(first, result);
        }
        return result;
    }

  private:
    static size_t lower_bound(const View& stream, Index bound) {
        const Index* end = stream.indices + stream.count;
        return size_t(std::lower_bound(stream.indices, end, bound) - stream.indices);
    }

    // Every window reads every stream, so sparser streams need larger windows.
    void allocate() {
        size_t entries = 1, range = 1;
        for (size_t s = 0; s < streams_.size(); ++s) {
            if (cursors_[s] == ends_[s]) continue;
            const Index* indices = streams_[s].indices;
            entries += ends_[s] - cursors_[s];
            range = std::max(range, size_t(indices[ends_[s] - 1] - indices[cursors_[s]]));
        }
        const double worthwhile = 8.0 * double(streams_.size()) * double(range) / double(entries);
        window_ = kSmallestWindow;
        while (window_ < kLargestWindow && double(window_) < worthwhile) window_ *= 2;
        words_ = window_ / 64;
        present_ = Buffer<uint64_t>(words_);
        ranks_ = Buffer<uint32_t>(words_);
    }

    // The lowest index not merged yet, if any.
    bool next_index(Index& first) const {
        bool found = false;
        for (size_t s = 0; s < streams_.size(); ++s) {
            if (cursors_[s] == ends_[s]) continue;
            const Index next = streams_[s].indices[cursors_[s]];
            if (!found || next < first) first = next;
            found = true;
        }
        return found;
    }

    // Marks the window's indices and ranks its words.
    void collect(Index first) {
        std::fill_n(present_.data(), words_, 0);
        for (size_t s = 0; s < streams_.size(); ++s) {
            const Index* indices = streams_[s].indices;
            size_t i = cursors_[s];
            for (; i < ends_[s] && size_t(indices[i] - first) < window_; ++i) {
                const auto at = size_t(indices[i] - first);
                present_[at / 64] |= uint64_t{1} << at % 64;
            }
            window_ends_[s] = i;
        }
        uint32_t rank = 0;
        for (size_t word = 0; word < words_; ++word) {
            ranks_[word] = rank;
            rank += uint32_t(std::popcount(present_[word]));
        }
        found_ = rank;
    }

    void reduce(Index first, Merged<Index, Value>& result) {
        reserve(result, result.count + found_);
        write_indices(first, result.indices.data() + result.count);
        Value* values = result.values.data() + result.count * width_;
        if constexpr (std::is_same_v<Sum, Value>) {
            std::fill_n(values, found_ * width_, Op::template identity<Sum>());
            for (size_t s = 0; s < streams_.size(); ++s) add_stream(s, first, values);
        } else {
            if (sums_.capacity() < found_ * width_) sums_ = Buffer<Sum>(found_ * width_);
            std::fill_n(sums_.data(), found_ * width_, Op::template identity<Sum>());
            for (size_t s = 0; s < streams_.size(); ++s) add_stream(s, first, sums_.data());
            for (size_t i = 0; i < found_ * width_; ++i) values[i] = narrow<Value>(sums_[i]);
        }
        result.count += found_;
    }

    void add_stream(size_t s, Index first, Sum* sums) {
        const View& stream = streams_[s];
        for (size_t i = cursors_[s]; i < window_ends_[s]; ++i) {
            const auto at = size_t(stream.indices[i] - first);
            const uint64_t bit = uint64_t{1} << at % 64;
            const auto below = size_t(std::popcount(present_[at / 64] & (bit - 1)));
            Sum* sum = sums + (ranks_[at / 64] + below) * width_;
            const Value* value = stream.values + i * width_;
            for (size_t j = 0; j < width_; ++j) sum[j] = Op::apply(sum[j], widen(value[j]));
        }
        cursors_[s] = window_ends_[s];
    }

    void write_indices(Index first, Index* indices) const {
        for (size_t word = 0; word < words_; ++word) {
            for (uint64_t bits = present_[word]; bits; bits &= bits - 1) {
                *indices++ = first + Index(word * 64 + size_t(std::countr_zero(bits)));
            }
        }
    }

    void reserve(Merged<Index, Value>& result, size_t count) const {
        if (count <= result.indices.capacity()) return;
        const size_t capacity = std::max(count, 2 * result.indices.capacity());
        result.indices.resize(capacity);
        result.values.resize(capacity * width_);
    }

    std::span<const View> streams_;
    size_t width_;
    std::vector<size_t> cursors_, ends_, window_ends_;
    size_t window_ = 0, words_ = 0;  // its length, and that of its bitmaps
    Buffer<uint64_t> present_;       // bits of the window's indices
    Buffer<uint32_t> ranks_;         // indices before each word
    size_t found_ = 0;
    Buffer<Sum> sums_;
};

}  // namespace detail
}  // namespace sparcel
