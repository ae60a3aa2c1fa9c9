// The k-th largest magnitude of a set, by a radix descent on its bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/buffer.hpp"
#include "simd/bits.hpp"

namespace sparcel {

namespace detail {

constexpr int kMostDigitBits = 11;

// Up to this many keys, comparing all with all is the fastest, because nothing branches.
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
        const Key rejected = Key{0} - Key(above >= k);  // all ones, so that nothing branches
        kth = std::min<Key>(kth, magnitudes[i] | rejected);
    }
    return kth;
}

constexpr size_t kFewSamples = 16;

// Estimates, from a small evenly spread sample, a magnitude that slightly more than k of key(0) …
// key(count - 1) reach. Returns 0 if k is too large for an estimate.
template <class Key, class Read>
Key sampled_limit(const Read& key, size_t count, size_t k, Key mask) {
    Key sample[kFewSamples];
    for (size_t i = 0; i < kFewSamples; ++i) sample[i] = key(i * count / kFewSamples);
    const double expected = double(k) * kFewSamples / double(count);
    const auto rank = size_t(expected + 2 * std::sqrt(expected) + 2);
    return rank < kFewSamples ? kth_of_few(sample, kFewSamples, rank, mask) : 0;
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
    if (spare.capacity() < count) spare = Buffer<Key>(count);
    Key* candidates = spare.data();
    while (count > detail::kCompareAll) {
        const auto [low, high] = detail::magnitude_range(keys, count, mask);
        if (low == high) return low;
        // For few keys, clearing a histogram would take longer than filling it.
        const int digit_bits = std::min(detail::kMostDigitBits, int(std::bit_width(count)) - 1);
        const int shift = std::max(0, int(std::bit_width(Key(high - low))) - digit_bits);
        uint32_t histogram[size_t{1} << detail::kMostDigitBits];
        std::fill_n(histogram, size_t{1} << digit_bits, 0);
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
    return detail::kth_of_few(keys, count, k, mask);
}

}  // namespace sparcel
