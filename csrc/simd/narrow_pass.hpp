// Rounding of float32 to 16 bits, in loops that each instruction set's compiler vectorises.
// `sparcel.core.kernels.definitions.few_bits.limited` says what they compute.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/bits.hpp"
#include "simd/kernels.hpp"

namespace sparcel {
namespace {

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// GCC may make a branch of a conditional expression, which keeps a loop from being vectorised.
inline uint32_t choose(bool which, uint32_t one, uint32_t other) {
    const uint32_t mask = uint32_t{0} - uint32_t(which);
    return (one & mask) | (other & ~mask);
}

constexpr uint32_t kInfinity = 0x7f800000;

// Each takes the bits of a magnitude, below those of infinity and no more than its largest number,
// and rounds it to nearest, ties to even.
struct ToBrain {
    static constexpr uint32_t largest = 0x7f7f0000, infinity = 0x7f80, nan = 0x7fc0;

    static uint32_t round(uint32_t magnitude) {
        return (magnitude + 0x7fff + (magnitude >> 16 & 1)) >> 16;
    }
};

struct ToHalf {
    static constexpr uint32_t largest = 0x477fe000, infinity = 0x7c00, nan = 0x7e00;

    static uint32_t round(uint32_t magnitude) {
        // Below 2^-14: adding 0.5 leaves units of 2^-24 in the lowest bits, rounded by the adder.
        const uint32_t denormal = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000;
        const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
        return choose(magnitude < 0x38800000, denormal, normal);
    }
};

template <class To>
void narrow_limited(const float* x, size_t n, uint16_t* narrow) {
    for (size_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(x[i]), magnitude = bits & Bits<uint32_t>::magnitude;
        const uint32_t rounded = To::round(std::min(magnitude, To::largest));
        const uint32_t special = choose(magnitude > kInfinity, To::nan, To::infinity);
        narrow[i] =
            uint16_t(choose(magnitude < kInfinity, rounded, special) | (bits >> 16 & 0x8000));
    }
}

constexpr NarrowPasses narrow_passes = {narrow_limited<ToHalf>, narrow_limited<ToBrain>};

}  // namespace
}  // namespace sparcel
