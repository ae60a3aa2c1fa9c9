// The dtypes of values: how they are stored, and the type in which they are computed.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace sparcel {

struct Half {
    uint16_t bits;
};

struct Brain {
    uint16_t bits;
};

// The type in which operations compute: float32 for halves, and unsigned for integers if the result
// is the same, because unsigned overflow is defined.
template <class T>
struct Wide {
    using Type = T;
};
template <>
struct Wide<Half> {
    using Type = float;
};
template <>
struct Wide<Brain> {
    using Type = float;
};

template <class T>
T widen(T x) {
    return x;
}

// After the shift the exponent is 112 too small. A multiplication repairs it, also for denormals;
// Inf and NaN are handled apart. There are no branches, so loops over it vectorise.
inline float widen(Half x) {
    const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t special = (x.bits & 0x7fff) >= 0x7c00 ? 0x7f800000 : 0;
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special | sign);
}

inline float widen(Brain x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

// Rounds to nearest, ties to even.
template <class T>
T narrow(typename Wide<T>::Type x) {
    return x;
}

template <>
inline Brain narrow<Brain>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <>
inline Half narrow<Half>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    const auto sign = uint16_t(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // 65520 and more round to Inf
    if (magnitude < 0x38800000) {
        // Below 2^-14: adding 0.5 leaves units of 2^-24 in the lowest bits, rounded by the adder.
        const float units = std::bit_cast<float>(magnitude) + 0.5f;
        return {uint16_t(sign | (std::bit_cast<uint32_t>(units) - 0x3f000000))};
    }
    const uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
    return {uint16_t(sign | rounded >> 13)};
}

// `identity` is the number that changes no bit of another one: 0 would turn -0 into 0.
struct AddOp {
    template <class T>
    static constexpr T identity() {
        return -T{0};
    }
    template <class T>
    static T apply(T a, T b) {
        if constexpr (std::is_integral_v<T>) {
            using Unsigned = std::make_unsigned_t<T>;
            return T(Unsigned(a) + Unsigned(b));
        } else {
            return a + b;
        }
    }
};

struct MultiplyOp {
    template <class T>
    static constexpr T identity() {
        return T{1};
    }
    template <class T>
    static T apply(T a, T b) {
        if constexpr (std::is_integral_v<T>) {
            using Unsigned = std::make_unsigned_t<T>;
            return T(Unsigned(a) * Unsigned(b));
        } else {
            return a * b;
        }
    }
};

template <class T>
constexpr T greatest() {
    using Limits = std::numeric_limits<T>;
    return Limits::has_infinity ? Limits::infinity() : Limits::max();
}

template <class T>
constexpr T least() {
    using Limits = std::numeric_limits<T>;
    return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
}

// NaN wins, as in torch.minimum and torch.maximum.
struct MinOp {
    template <class T>
    static constexpr T identity() {
        return greatest<T>();
    }
    template <class T>
    static T apply(T a, T b) {
        return b < a || b != b ? b : a;
    }
};

struct MaxOp {
    template <class T>
    static constexpr T identity() {
        return least<T>();
    }
    template <class T>
    static T apply(T a, T b) {
        return b > a || b != b ? b : a;
    }
};

}  // namespace sparcel
