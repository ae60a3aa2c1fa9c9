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

// dense[i] = op(dense[i], v) for each index and its row of `width` values.
template <class Op, class Index, class Value>
void scatter_reduce(Value* dense, const Index* indices, const Value* values, size_t count,
                    size_t width) {
    for (size_t i = 0; i < count; ++i) {
        Value* row = dense + size_t(indices[i]) * width;
        for (size_t j = 0; j < width; ++j) {
            row[j] = narrow<Value>(Op::apply(widen(row[j]), widen(values[i * width + j])));
        }
    }
}

// dense[i] = v for each index and its row of `width` values.
template <class Index, class Value>
void scatter(Value* dense, const Index* indices, const Value* values, size_t count, size_t width) {
    if (width == 1) {  // copying a length that is not known takes a call
        for (size_t i = 0; i < count; ++i) dense[indices[i]] = values[i];
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        std::copy_n(values + i * width, width, dense + size_t(indices[i]) * width);
    }
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

// dense[i] = v for each index, which are sorted, and `fill` everywhere else.
template <class Index, class Value>
void expand(Value* dense, size_t size, Value fill, const Index* indices, const Value* values,
            size_t count, size_t width) {
    // Many entries are written to each block while it is in the cache. Few entries cost less than
    // filling in blocks, which reads the memory first.
    const size_t block = count > size / 64 ? kExpandBlock : size;
    for (size_t begin = 0, i = 0; begin < size; begin += block) {
        const size_t end = std::min(size, begin + block);
        fill_range(dense + begin * width, dense + end * width, fill);
        const size_t first = i;
        while (i < count && size_t(indices[i]) < end) ++i;
        scatter(dense, indices + first, values + first * width, i - first, width);
    }
}

// dense[i] += v for each index. Sums are limited to the largest finite number.
template <class Index, class Value>
void add_saturated(Value* dense, const Index* indices, const Value* values, size_t count) {
    constexpr Value most = std::numeric_limits<Value>::max();
    for (size_t i = 0; i < count; ++i) {
        Value& sum = dense[indices[i]];
        sum = std::clamp(sum + values[i], -most, most);
    }
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
