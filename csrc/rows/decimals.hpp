// Reading of decimal numbers, correctly rounded.
#pragma once

#include <bit>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <system_error>
#include <type_traits>

namespace sparcel {

inline bool is_digit(char c) { return uint8_t(c - '0') < 10; }

// Appends the digits at `at` to `number`, modulo 2^64, and returns where they end.
inline const char* read_digits(const char* at, uint64_t& number) {
    for (; is_digit(*at); ++at) number = number * 10 + uint8_t(*at - '0');
    return at;
}

namespace detail {

// All of these are exact.
constexpr double kPowersOfTen[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,
                                   1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19};
constexpr std::ptrdiff_t kMostDigits = 19;  // that fit into 64 bits
constexpr uint64_t kMostExact = uint64_t{1} << std::numeric_limits<double>::digits;

// Tells whether rounding `nearest` to Float gives the Float nearest to x, where `nearest` is the
// double nearest to some x >= 0. Only in the middle of two floats may x lie on the other side.
template <class Float>
bool rounds_like_exact(double nearest) {
    if constexpr (std::is_same_v<Float, double>) return true;
    constexpr uint64_t kLower = (uint64_t{1} << 29) - 1, kMiddle = uint64_t{1} << 28;
    return (std::bit_cast<uint64_t>(nearest) & kLower) != kMiddle &&
           (nearest >= double(std::numeric_limits<float>::min()) || nearest == 0);
}

// Tells whether a number that no double can hold is too small, not too large: whether its first
// digit that is not zero stands behind the point.
inline bool underflows(const char* at, const char* end) {
    at += *at == '-';
    int64_t place = 0, first = 0;  // of the digit in front of the point; of the first that counts
    for (; is_digit(*at); ++at) place += place || *at != '0';
    if (*at == '.') {
        for (++at; is_digit(*at); ++at, --first) {
            if (place || *at != '0') break;
        }
    }
    while (is_digit(*at)) ++at;
    int32_t exponent = 0;
    if (*at == 'e' || *at == 'E') {
        at += 1 + (at[1] == '+');
        // An exponent that 31 bits cannot hold decides alone.
        const bool negative = *at == '-';
        if (std::from_chars(at, end, exponent).ec != std::errc()) return negative;
    }
    return (place ? place : first) + exponent < 0;
}

// Reads any decimal. What is too small for Float becomes zero.
template <class Float>
const char* read_any_decimal(const char* at, const char* end, Float& value) {
    if (*at == '+' && *++at == '-') return nullptr;
    auto [stop, error] = std::from_chars(at, end, value);
    if (error == std::errc::result_out_of_range) {
        double wide = 0;
        error = std::from_chars(at, end, wide).ec;
        if (error == std::errc::result_out_of_range && underflows(at, end)) error = std::errc();
        if (std::abs(wide) >= 1) return nullptr;
        value = std::copysign(Float(wide), *at == '-' ? Float(-1) : Float(1));
    }
    return error == std::errc() && std::isfinite(value) ? stop : nullptr;
}

}  // namespace detail

// Reads the number at `at` and returns where it ends, or null if there is none, or none that is
// finite. Some character before `end` must be part of no number.
template <class Float>
const char* read_decimal(const char* const start, const char* end, Float& value) {
    const bool negative = *start == '-';
    const char* const first = start + (negative || *start == '+');
    uint64_t number = 0;
    const char* at = read_digits(first, number);
    std::ptrdiff_t count = at - first, behind_point = 0;
    if (*at == '.') {
        const char* const point = ++at;
        at = read_digits(point, number);
        behind_point = at - point;
        count += behind_point;
    }
    // Both operands are exact, so the quotient is rounded once.
    if (count > 0 && count <= detail::kMostDigits && number <= detail::kMostExact && *at != 'e' &&
        *at != 'E') {
        const double nearest = double(number) / detail::kPowersOfTen[behind_point];
        if (detail::rounds_like_exact<Float>(nearest)) {
            value = Float(negative ? -nearest : nearest);
            return at;
        }
    }
    return detail::read_any_decimal(start, end, value);
}

}  // namespace sparcel
