// How floating-point values are read as integers: magnitudes compare as integers do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparcel {

// Storage is the unsigned integer as wide as the dtype; Key is what a lane of a register holds.
template <class Storage>
struct Bits;

template <>
struct Bits<uint16_t> {
    using Key = uint32_t;
    static constexpr Key magnitude = 0x7fff;
};

template <>
struct Bits<uint32_t> {
    using Key = uint32_t;
    static constexpr Key magnitude = 0x7fffffff;
};

template <>
struct Bits<uint64_t> {
    using Key = uint64_t;
    static constexpr Key magnitude = 0x7fffffffffffffff;
};

}  // namespace sparcel
