// Writes sparse entries into dense vectors, and checks indices from outside.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/numbers.hpp"

namespace sparcel {

constexpr size_t kExpandBlock = 4096;  // coordinates

// Calls write(index, i) for entry i = first, first + 1, … as long as their indices lie in
// [0, limit); returns the i at which it stopped. Each index is read once, so what is checked is
// what is used, also while another thread changes the indices.
template <class Index, class Write>
size_t for_each_below(size_t limit, const Index* indices, size_t first, size_t count,
                      const Write& write) {
    for (size_t i = first; i < count; ++i) {
        const size_t index = size_t(static_cast<const volatile Index*>(indices)[i]);
        if (index >= limit) return i;
        write(index, i);
    }
    return count;
}

// dense[i] = op(dense[i], v) for each index and its row of `width` values, up to the first index
// from `size` on; returns how many entries that are.
template <class Op, class Index, class Value>
size_t scatter_reduce(Value* dense, size_t size, const Index* indices, const Value* values,
                      size_t count, size_t width) {
    return for_each_below(size, indices, 0, count, [&](size_t index, size_t i) {
        Value* row = dense + index * width;
        for (size_t j = 0; j < width; ++j) {
            row[j] = narrow<Value>(Op::apply(widen(row[j]), widen(values[i * width + j])));
        }
    });
}

// dense[i] = v for each index and its row of `width` values, from entry `first` up to the first
// index from `size` on; returns the number of the entry at which it stopped.
template <class Index, class Value>
size_t scatter(Value* dense, size_t size, const Index* indices, const Value* values, size_t first,
               size_t count, size_t width) {
    if (width == 1) {  // copying a length that is not known takes a call
        return for_each_below(size, indices, first, count,
                              [&](size_t index, size_t i) { dense[index] = values[i]; });
    }
    return for_each_below(size, indices, first, count, [&](size_t index, size_t i) {
        std::copy_n(values + i * width, width, dense + index * width);
    });
}

// Sets [first, last) to `fill`. Unlike a loop, the C library clears large memory without reading
// it.
template <class Value>
void fill_range(Value* first, Value* last, Value fill) {
    constexpr std::array<std::byte, sizeof(Value)> zero = {};
    if (std::bit_cast<std::array<std::byte, sizeof(Value)>>(fill) == zero) {
        std::memset(first, 0, size_t(last - first) * sizeof(Value));
    } else {
        std::fill(first, last, fill);
    }
}

// dense[i] = v for each index, which are sorted, and `fill` everywhere else. Returns as `scatter`.
template <class Index, class Value>
size_t expand(Value* dense, size_t size, Value fill, const Index* indices, const Value* values,
              size_t count, size_t width) {
    // Many entries are written to each block while it is in the cache. Few entries cost less than
    // filling in blocks, which reads the memory first.
    const size_t block = count > size / 64 ? kExpandBlock : size;
    size_t i = 0;
    for (size_t begin = 0; begin < size; begin += block) {
        const size_t end = std::min(size, begin + block);
        fill_range(dense + begin * width, dense + end * width, fill);
        i = scatter(dense, end, indices, values, i, count, width);
    }
    return i;
}

// dense[i] += v for each index. Sums are limited to the largest finite number. Returns as
// `scatter_reduce`.
template <class Index, class Value>
size_t add_saturated(Value* dense, size_t size, const Index* indices, const Value* values,
                     size_t count) {
    constexpr Value most = std::numeric_limits<Value>::max();
    return for_each_below(size, indices, 0, count, [&](size_t index, size_t i) {
        Value& sum = dense[index];
        sum = std::clamp(sum + values[i], -most, most);
    });
}

// Position of the first index that is outside [0, size) or not above its predecessor, else -1.
template <class Index>
int64_t check_indices(const Index* indices, size_t count, int64_t size) {
    constexpr size_t block = 1024;
    Index previous = -1;
    for (size_t begin = 0; begin < count; begin += block) {
        const size_t end = begin + block < count ? begin + block : count;
        // One flag for the block, without branches, so that the loop vectorises.
        int wrong = indices[begin] <= previous || indices[end - 1] >= size;
        for (size_t i = begin + 1; i < end; ++i) wrong |= indices[i] <= indices[i - 1];
        for (size_t i = begin; wrong && i < end; ++i) {
            if (indices[i] <= previous || indices[i] >= size) return int64_t(i);
            previous = indices[i];
        }
        previous = indices[end - 1];
    }
    return -1;
}

}  // namespace sparcel
