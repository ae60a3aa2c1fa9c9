// Floating-point values read as integers: their magnitudes compare like integers.
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

// Returns the bits of the value stored at `at`. C++ allows copying the bytes of a float, but not
// reading it through a pointer to integers.
template <class Storage>
Storage load_bits(const Storage* at) {
    Storage bits;
    std::memcpy(&bits, at, sizeof bits);
    return bits;
}

}  // namespace sparcel
