// The k-th largest magnitude of a set, by a radix descent on its bits.
#pragma once

#include <algorithm>
#include <bit>
#include <functional>

#include "buffer.hpp"
#include "simd/bits.hpp"

namespace sparcel {

namespace detail {

constexpr int kDigitBits = 11;
constexpr size_t kFewKeys = 256;

// Up to this many keys, comparing all with all beats every cleverer way: nothing branches.
constexpr size_t kCompareAll = 32;

template <class Key>
Key kth_of_few(const Key* keys, size_t count, size_t k, Key mask) {
    Key magnitudes[kCompareAll] = {};
    for (size_t i = 0; i < count; ++i) magnitudes[i] = keys[i] & mask;
    Key kth = mask;
    for (size_t i = 0; i < count; ++i) {
        Key above = 0;
        for (size_t j = 0; j < count; j += 8) {
            for (size_t lane = 0; lane < 8; ++lane) above += magnitudes[j + lane] > magnitudes[i];
        }
        if (above < k) kth = std::min(kth, magnitudes[i]);
    }
    return kth;
}

template <class Key>
struct Range {
    Key low, high;
};

template <class Key>
Range<Key> magnitude_range(const Key* keys, size_t count, Key mask) {
    Range<Key> range{mask, 0};
    for (size_t i = 0; i < count; ++i) {
        const Key magnitude = keys[i] & mask;
        range.low = std::min(range.low, magnitude);
        range.high = std::max(range.high, magnitude);
    }
    return range;
}

}  // namespace detail

// Returns the k-th largest of keys[i] & mask, 1 <= k <= count. `spare` is working memory that the
// caller keeps between calls.
template <class Key>
Key kth_magnitude(const Key* keys, size_t count, size_t k, Key mask, Buffer<Key>& spare) {
    if (count <= detail::kCompareAll) return detail::kth_of_few(keys, count, k, mask);
    if (spare.capacity() < count) spare.resize(count);
    Key* candidates = spare.data();
    while (count > detail::kFewKeys) {
        const auto [low, high] = detail::magnitude_range(keys, count, mask);
        if (low == high) return low;
        const int shift = std::max(0, int(std::bit_width(Key(high - low))) - detail::kDigitBits);
        uint32_t histogram[size_t{1} << detail::kDigitBits] = {};
        for (size_t i = 0; i < count; ++i) ++histogram[((keys[i] & mask) - low) >> shift];
        size_t digit = size_t((high - low) >> shift);
        while (k > histogram[digit]) k -= histogram[digit--];
        size_t kept = 0;
        for (size_t i = 0; i < count; ++i) {
            const Key magnitude = keys[i] & mask;
            candidates[kept] = magnitude;
            kept += ((magnitude - low) >> shift) == digit;
        }
        keys = candidates;
        count = kept;
    }
    for (size_t i = 0; i < count; ++i) candidates[i] = keys[i] & mask;
    std::nth_element(candidates, candidates + (k - 1), candidates + count, std::greater<Key>());
    return candidates[k - 1];
}

}  // namespace sparcel
