// Sorted indices in few bits each, as Elias and Fano write them.
//
// The low bits of each index are stored as they are. The i-th index, whose other bits are the
// number h, sets bit h + i of a bitmap: these bits are in order, too, and no two are the same. With
// about as many values of h as there are indices, the bitmap takes two to three bits an index. All
// words follow from the counts, so nothing else is stored, and no order of indices takes more.
//
// The bitmap comes first. The low bits follow in the bit after it, and zeros fill the last word.
//
// Where more than a quarter of the coordinates have an index, a plain bitmap of all coordinates is
// shorter, and takes the place of both.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sparcel {

// The low bits of one index can be read at once, from whichever bit of a byte they start at.
constexpr int kMostLowBits = 57;

// Where `count` indices below `size`, at least as many, lie in 64-bit words. It is passed by value,
// so that the compiler need not expect words and indices to be written over it.
struct Packing {
    Packing(uint64_t count, uint64_t size) : count(count) {
        if (count == 0) return;
        if (count > size / 4) {
            plain = true;
            bitmap_bits = size;
            words = bits_to_words(size);
            return;
        }
        low_bits = unsigned(std::min(int(std::bit_width(size / count)) - 1, kMostLowBits));
        bitmap_bits = count + ((size - 1) >> low_bits);
        const uint64_t bits = bitmap_bits + count * low_bits;
        words = bits_to_words(bits);
    }

    static uint64_t bits_to_words(uint64_t bits) { return bits / 64 + (bits % 64 != 0); }
    uint64_t bitmap_words() const { return bits_to_words(bitmap_bits); }
    uint64_t low_mask() const { return (uint64_t{1} << low_bits) - 1; }

    uint64_t count;
    bool plain = false;  // whether bit i of the bitmap stands for coordinate i
    unsigned low_bits = 0;
    uint64_t bitmap_bits = 0;
    uint64_t words = 0;
};

// Writes all words, and tells whether the bitmap has a place for every index. Garbage writes
// nowhere else.
template <class Index>
bool pack_indices(Packing packing, const Index* indices, uint64_t* words) {
    std::fill_n(words, packing.words, 0);
    const unsigned low_bits = packing.low_bits;
    uint64_t* place = words + packing.bitmap_bits / 64;  // where the next low bits go
    unsigned used = packing.bitmap_bits % 64;            // the bits of that word before them
    uint64_t lows = 0, bitmap = 0, word = 0;             // what is not written yet
    for (uint64_t i = 0; i < packing.count; ++i) {
        const uint64_t index = uint64_t(indices[i]), low = index & packing.low_mask();
        const uint64_t bit = packing.plain ? index : (index >> low_bits) + i;
        if (bit / 64 != word) {
            words[word] |= bitmap;
            word = bit / 64, bitmap = 0;
            if (word >= packing.bitmap_words()) return false;
        }
        bitmap |= uint64_t{1} << bit % 64;
        lows |= low << used;
        used += low_bits;
        if (used >= 64) {
            *place++ |= lows;
            used -= 64;
            lows = low >> (low_bits - used);
        }
    }
    if (packing.count) words[word] |= bitmap;
    if (lows) *place |= lows;
    return true;
}

// Reads the words of a packing, and tells whether their bitmap has as many bits as there are
// indices; garbage may give indices that are out of order or range.
template <class Index>
bool unpack_indices(Packing packing, const uint64_t* words, Index* indices) {
    static_assert(std::endian::native == std::endian::little);
    const uint64_t count = packing.bitmap_words();
    const auto bitmap = [&](uint64_t word) {
        const bool whole = word + 1 < count || packing.bitmap_bits % 64 == 0;
        return whole ? words[word] : words[word] & ((uint64_t{1} << packing.bitmap_bits % 64) - 1);
    };
    uint64_t found = 0;
    for (uint64_t word = 0; word < count; ++word) found += uint64_t(std::popcount(bitmap(word)));
    if (found != packing.count) return false;

    const auto* bytes = reinterpret_cast<const uint8_t*>(words);
    const uint64_t mask = packing.low_mask();
    uint64_t low_bit = packing.bitmap_bits, i = 0;
    for (uint64_t word = 0; word < count; ++word) {
        for (uint64_t left = bitmap(word); left; left &= left - 1, ++i) {
            const uint64_t bit = 64 * word + uint64_t(std::countr_zero(left));
            const uint64_t high = packing.plain ? bit : bit - i;
            const uint64_t byte = std::min(low_bit / 8, 8 * packing.words - 8);
            uint64_t low;
            std::memcpy(&low, bytes + byte, sizeof low);
            low = packing.low_bits ? low >> (low_bit - 8 * byte) & mask : 0;
            indices[i] = Index(high << packing.low_bits | low);
            low_bit += packing.low_bits;
        }
    }
    return true;
}

}  // namespace sparcel
