// How floating-point values are read as integers: magnitudes compare as integers do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

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

// The bits of a value that is stored at `at`. What is stored there may be a float, which C++ allows
// to be copied, but not to be read through a pointer to integers.
template <class Storage>
Storage load_bits(const Storage* at) {
    Storage bits;
    std::memcpy(&bits, at, sizeof bits);
    return bits;
}

}  // namespace sparcel
