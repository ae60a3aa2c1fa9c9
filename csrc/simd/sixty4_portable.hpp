// 64 elements at a time, without instructions of any one processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sparcel {
namespace {

// Makes a bit of each of 64 bytes that are 0 or 1.
inline uint64_t bits_of_flags(const uint8_t* flags) {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) {
        uint64_t eight;
        std::memcpy(&eight, flags + 8 * i, sizeof eight);
        word |= (eight * 0x0102040810204080 >> 56) << 8 * i;
    }
    return word;
}

struct Sixty4 {
    uint8_t bytes[64];

    // The first eight bits of exponents: shifts by one to the left, then by so many to the right.
    template <class Word>
    static Sixty4 of_exponents(const Word* x, unsigned shift) {
        Sixty4 all;
        for (int i = 0; i < 64; ++i) all.bytes[i] = uint8_t(Word(x[i] << 1) >> shift);
        return all;
    }

    uint64_t reaching(uint8_t limit) const {
        uint8_t flags[64];
        for (int i = 0; i < 64; ++i) flags[i] = bytes[i] >= limit;
        return bits_of_flags(flags);
    }

    // Which of 64 elements differ.
    template <class Word>
    static uint64_t differing(const Word* a, const Word* b) {
        uint8_t flags[64];
        for (int i = 0; i < 64; ++i) flags[i] = a[i] != b[i];
        return bits_of_flags(flags);
    }
};

}  // namespace
}  // namespace sparcel
