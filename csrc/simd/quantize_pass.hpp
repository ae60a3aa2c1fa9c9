// QSGD on one bucket, in loops of fixed length that each instruction set's compiler vectorises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bits.hpp"

namespace sparcel {
namespace {

// Philox4x32-10 (Salmon et al., SC'11) on consecutive counters whose upper 64 bits are 0.
constexpr size_t kPhiloxBlocks = 64;
constexpr size_t kPhiloxWords = 4 * kPhiloxBlocks;

inline void philox(uint64_t first_block, uint64_t seed, uint32_t (&words)[kPhiloxWords]) {
    uint32_t c0[kPhiloxBlocks], c1[kPhiloxBlocks], c2[kPhiloxBlocks], c3[kPhiloxBlocks];
    for (size_t i = 0; i < kPhiloxBlocks; ++i) {
        c0[i] = uint32_t(first_block + i);
        c1[i] = uint32_t((first_block + i) >> 32);
        c2[i] = c3[i] = 0;
    }
    uint32_t key0 = uint32_t(seed);
    uint32_t key1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        for (size_t i = 0; i < kPhiloxBlocks; ++i) {
            const uint64_t p0 = uint64_t{0xD2511F53} * c0[i];
            const uint64_t p1 = uint64_t{0xCD9E8D57} * c2[i];
            c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ key0;
            c1[i] = uint32_t(p1);
            c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ key1;
            c3[i] = uint32_t(p0);
        }
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    for (size_t i = 0; i < kPhiloxBlocks; ++i) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

inline float bucket_scale(const float* x, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= Bits<uint32_t>::magnitude;
        largest = bits > largest ? bits : largest;
    }
    float scale;
    std::memcpy(&scale, &largest, sizeof scale);
    constexpr uint32_t infinity = 0x7f800000;
    return largest < infinity ? scale : __builtin_nanf("");
}

inline float quantize_bucket(const float* x, size_t n, int bits, uint64_t seed, uint64_t offset,
                             uint8_t* codes) {
    const float scale = bucket_scale(x, n);
    // False for NaN too, so a NaN bucket gets codes of 0, like a bucket of zeros.
    if (!(scale > 0)) {
        std::memset(codes, 0, n);
        return scale;
    }
    const float levels = float((1 << (bits - 1)) - 1);
    uint32_t words[kPhiloxWords];
    for (size_t i = 0; i < n;) {
        const size_t skip = (offset + i) % kPhiloxWords;
        const size_t count = n - i < kPhiloxWords - skip ? n - i : kPhiloxWords - skip;
        philox((offset + i - skip) / 4, seed, words);
        for (size_t j = 0; j < count; ++j) {
            const float value = x[i + j];
            const float exact = __builtin_fabsf(value) / scale * levels;
            const int lower = int(exact);
            const float random = float(int(words[skip + j] >> 8)) * 0x1p-24f;
            const int level = lower + (random < exact - float(lower));
            const int sign = (value < 0) & (level > 0);
            codes[i + j] = uint8_t(sign << (bits - 1) | level);
        }
        i += count;
    }
    return scale;
}

}  // namespace
}  // namespace sparcel
