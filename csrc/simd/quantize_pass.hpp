// Vectors in few bits a value, group by group, in loops that each instruction set's compiler
// vectorises. `sparcel.core.kernels.definitions.few_bits` says what they compute.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd/bits.hpp"
#include "simd/kernels.hpp"
#include "simd/narrow_pass.hpp"

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

// The words of one window of the random sequence, which several short groups share.
struct Window {
    uint64_t seed;
    uint64_t start = UINT64_MAX;
    uint32_t words[kPhiloxWords];

    void move_to(uint64_t first) {
        if (start != first) philox(first / 4, seed, words);
        start = first;
    }
};

// Calls run(n). Loops over the usual lengths of groups are compiled for these alone.
template <class Run>
[[gnu::always_inline]] inline void with_usual_length(size_t n, const Run& run) {
    if (n == 64) return run(std::integral_constant<size_t, 64>());
    if (n == 32) return run(std::integral_constant<size_t, 32>());
    run(n);
}

// Returns the largest magnitude of a group, NaN if one is not finite.
[[gnu::always_inline]] inline float largest_magnitude(const float* x, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(x[i]) & Bits<uint32_t>::magnitude;
        largest = bits > largest ? bits : largest;
    }
    return largest < kInfinity ? from_bits(largest) : __builtin_nanf("");
}

// Returns a scale that is not negative as bfloat16 has it, limited to the largest finite one.
inline float narrow_scale(float scale, bool up) {
    const uint32_t bits = bits_of(scale);
    const uint32_t rounded = (bits + (up ? 0xffff : 0x7fff + (bits >> 16 & 1))) >> 16;
    return from_bits(std::min<uint32_t>(rounded, 0x7f7f) << 16);
}

inline float signed_as(float magnitude, bool negative) {
    return from_bits(bits_of(magnitude) | uint32_t(negative) << 31);
}

// Rounds a group to the nearest of `levels` levels of a scale.
[[gnu::always_inline]] inline void round_to_nearest(const float* x, size_t n, int levels,
                                                    float scale, uint8_t* codes, float* values) {
    const float inverse = float(levels) / scale, step = scale / float(levels);
    for (size_t i = 0; i < n; ++i) {
        const int nearest = int(__builtin_fabsf(x[i]) * inverse + 0.5f);
        const int level = nearest < levels ? nearest : levels;
        const bool negative = (x[i] < 0) & (level > 0);
        codes[i] = uint8_t(level + negative * (levels + 1));
        values[i] = signed_as(float(level) * step, negative);
    }
}

// Rounds a group to one of the two levels around each value, at random and without bias.
inline void round_at_random(const float* x, size_t n, int levels, float scale, uint64_t offset,
                            Window& random, uint8_t* codes, float* values) {
    const float step = scale / float(levels);
    for (size_t i = 0; i < n;) {
        const size_t skip = (offset + i) % kPhiloxWords;
        const size_t count = std::min(n - i, kPhiloxWords - skip);
        random.move_to(offset + i - skip);
        for (size_t j = 0; j < count; ++j) {
            const float value = x[i + j];
            const float exact = __builtin_fabsf(value) / scale * float(levels);
            const int lower = int(exact);
            const float drawn = float(int(random.words[skip + j] >> 8)) * 0x1p-24f;
            const int either = lower + (drawn < exact - float(lower));
            const int level = either < levels ? either : levels;
            const bool negative = (value < 0) & (level > 0);
            codes[i + j] = uint8_t(level + negative * (levels + 1));
            values[i + j] = signed_as(float(level) * step, negative);
        }
        i += count;
    }
}

// Returns the sum of n numbers, where half of them are added to the other half, again and again.
// Zeros, which change no sum, fill them up to a power of two. `sums` has room for half of these.
template <class Number>
[[gnu::always_inline]] inline double sum_by_halves(size_t n, const Number& number, double* sums) {
    size_t half = std::bit_ceil(n) / 2;
    if (half == 0) return number(0);
    for (size_t i = 0; i < n - half; ++i) sums[i] = number(i) + number(half + i);
    for (size_t i = n - half; i < half; ++i) sums[i] = number(i);
    while (half > 1) {
        half /= 2;
        for (size_t i = 0; i < half; ++i) sums[i] += sums[half + i];
    }
    return sums[0];
}

// Rounds a group to two magnitudes, the means of those up to the mean and of those above.
[[gnu::always_inline]] inline void round_to_means(const float* x, size_t n, bool narrow,
                                                  double* sums, uint8_t* codes, float* scales,
                                                  float* values) {
    const auto magnitude = [x](size_t i) { return double(__builtin_fabsf(x[i])); };
    const double total = sum_by_halves(n, magnitude, sums), mean = total / double(n);
    const auto above = [=](size_t i) { return magnitude(i) > mean; };
    const double upper =
        sum_by_halves(n, [=](size_t i) { return above(i) ? magnitude(i) : 0; }, sums);
    uint32_t count = 0;
    for (size_t i = 0; i < n; ++i) {
        count += above(i);
        codes[i] = uint8_t(above(i) | bits_of(x[i]) >> 31 << 1);
    }
    float low = float((total - upper) / double(n - count));
    float high = count ? float(upper / double(count)) : 0;
    if (narrow) {
        low = narrow_scale(low, false);
        high = narrow_scale(high, false);
    }
    scales[0] = low, scales[1] = high;
    for (size_t i = 0; i < n; ++i) {
        values[i] = signed_as(codes[i] & 1 ? high : low, codes[i] >> 1);
    }
}

// Rounds a group, and writes its scales.
[[gnu::always_inline]] inline void quantize_group(const Coding& coding, const float* x, size_t n,
                                                  uint64_t offset, double* sums, Window& random,
                                                  uint8_t* codes, float* scales, float* values) {
    constexpr float smallest = 0x1p-100f, most = 3.4e38f;
    const float largest = largest_magnitude(x, n);
    if (largest != largest) {
        std::fill_n(scales, coding.scales(), largest);
        std::memset(codes, 0, n);
        std::fill_n(values, n, largest);
    } else if (coding.scales() == 2) {
        round_to_means(x, n, coding.narrow, sums, codes, scales, values);
    } else if (largest == 0 || (!coding.stochastic && largest < smallest)) {
        *scales = 0;
        std::memset(codes, 0, n);
        std::fill_n(values, n, 0.0f);
    } else {
        const float scale = std::min(largest, most);
        *scales = coding.narrow ? narrow_scale(scale, coding.stochastic) : scale;
        if (coding.stochastic) {
            round_at_random(x, n, coding.levels(), *scales, offset, random, codes, values);
        } else {
            round_to_nearest(x, n, coding.levels(), *scales, codes, values);
        }
    }
}

inline void quantize_groups(const Coding& coding, const float* x, size_t n, uint64_t offset,
                            double* sums, uint8_t* codes, float* scales, float* values) {
    Window random{coding.seed};
    for (size_t at = 0; at < n; at += coding.group, scales += coding.scales()) {
        const size_t length = std::min(coding.group, n - at);
        const auto round = [&](auto count) {
            quantize_group(coding, x + at, count, offset + at, sums, random, codes + at, scales,
                           values + at);
        };
        with_usual_length(length, round);
    }
}

inline double residual_groups(const Coding& coding, const float* x, size_t n, double* sums,
                              uint8_t* codes, float* scales, float* residual) {
    Window random{coding.seed};
    float fell[kMostResidual] = {};
    for (size_t at = 0; at < n; at += coding.group, scales += coding.scales()) {
        const auto round = [&](auto count) {
            float values[kMostResidual];
            quantize_group(coding, x + at, count, 0, sums, random, codes + at, scales, values);
            for (size_t i = 0; i < count; ++i) {
                const float value = x[at + i], rest = value - values[i];
                fell[i] += __builtin_fabsf(value) - __builtin_fabsf(rest);
                residual[at + i] = rest;
            }
        };
        with_usual_length(std::min(coding.group, n - at), round);
    }
    double total = 0;
    for (const float one : fell) total += double(one);
    return total;
}

[[gnu::always_inline]] inline void dequantize_group(const Coding& coding, const uint8_t* codes,
                                                    size_t n, const float* scales, float* values) {
    const int levels = coding.levels();
    if (coding.scales() == 2) {
        const float lower = scales[0], upper = scales[1];
        for (size_t i = 0; i < n; ++i) {
            const float magnitude = codes[i] & 1 ? upper : lower;
            values[i] = from_bits(bits_of(magnitude) ^ uint32_t(codes[i] >> 1) << 31);
        }
    } else {
        const float step = scales[0] / float(levels);
        for (size_t i = 0; i < n; ++i) {
            const float magnitude = float(int(codes[i]) & levels) * step;
            values[i] = from_bits(bits_of(magnitude) ^ uint32_t(codes[i] > levels) << 31);
        }
    }
}

inline void dequantize_groups(const Coding& coding, const uint8_t* codes, size_t n,
                              const float* scales, float* values) {
    for (size_t at = 0; at < n; at += coding.group, scales += coding.scales()) {
        const auto decode = [&](auto count) {
            dequantize_group(coding, codes + at, count, scales, values + at);
        };
        with_usual_length(std::min(coding.group, n - at), decode);
    }
}

// Calls run(bits) with a constant, for which its loops are compiled.
template <class Run>
void with_bits(int bits, const Run& run) {
    switch (bits) {
        case 2:
            return run(std::integral_constant<unsigned, 2>());
        case 3:
            return run(std::integral_constant<unsigned, 3>());
        case 4:
            return run(std::integral_constant<unsigned, 4>());
        case 5:
            return run(std::integral_constant<unsigned, 5>());
        case 6:
            return run(std::integral_constant<unsigned, 6>());
        case 7:
            return run(std::integral_constant<unsigned, 7>());
        default:
            return run(std::integral_constant<unsigned, 8>());
    }
}

// Codes are a stream of bits, which begins with the lowest of the first byte, so that 8 codes take
// `bits` bytes. Codes past the end are zero, and there is room for 8 of them.
inline void pack_codes(int bits, uint8_t* codes, size_t n, uint8_t* packed) {
    std::memset(codes + n, 0, 8);
    with_bits(bits, [=](auto constant) {
        constexpr unsigned b = constant;
        const auto joined = [codes](size_t i) {
            uint64_t x;
            std::memcpy(&x, codes + 8 * i, sizeof x);
            x = (x & 0x00ff00ff00ff00ff) | (x & 0xff00ff00ff00ff00) >> (8 - b);
            x = (x & 0x0000ffff0000ffff) | (x & 0xffff0000ffff0000) >> (16 - 2 * b);
            return (x & 0xffffffff) | x >> 32 << 4 * b;
        };
        for (size_t i = 0; i < n / 8; ++i) {
            const uint64_t x = joined(i);
            std::memcpy(packed + b * i, &x, b);
        }
        const uint64_t last = joined(n / 8);
        std::memcpy(packed + b * (n / 8), &last, (n % 8 * b + 7) / 8);
    });
}

// There is room for 8 codes more.
inline void unpack_codes(int bits, const uint8_t* packed, size_t n, uint8_t* codes) {
    with_bits(bits, [=](auto constant) {
        constexpr unsigned b = constant;
        const auto part = [codes](size_t i, uint64_t x) {
            constexpr uint64_t four = (uint64_t{1} << 4 * b) - 1;
            constexpr uint64_t two = uint64_t{(1u << 2 * b) - 1} * 0x0000000100000001;
            constexpr uint64_t one = uint64_t{(1u << b) - 1} * 0x0001000100010001;
            x = (x & four) | (x & four << 4 * b) << (32 - 4 * b);
            x = (x & two) | (x & two << 2 * b) << (16 - 2 * b);
            x = (x & one) | (x & one << b) << (8 - b);
            std::memcpy(codes + 8 * i, &x, sizeof x);
        };
        const size_t bytes = (n * b + 7) / 8;
        size_t i = 0;
        for (; b * i + 8 <= bytes; ++i) {  // reads more than it needs, in one go
            uint64_t x;
            std::memcpy(&x, packed + b * i, sizeof x);
            part(i, x);
        }
        for (; b * i < bytes; ++i) {
            uint64_t x = 0;
            std::memcpy(&x, packed + b * i, std::min<size_t>(b, bytes - b * i));
            part(i, x);
        }
    });
}

constexpr CodePasses code_passes = {quantize_groups, residual_groups, dequantize_groups, pack_codes,
                                    unpack_codes};

}  // namespace
}  // namespace sparcel
