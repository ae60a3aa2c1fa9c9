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
#include <type_traits>

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

    // The bit that the i-th index sets, whose bits above the low ones are `high`, and back.
    uint64_t bit_of(uint64_t high, uint64_t i) const { return high + (plain ? 0 : i); }
    uint64_t high_of(uint64_t bit, uint64_t i) const { return bit - (plain ? 0 : i); }

    uint64_t count;
    bool plain = false;  // whether bit i of the bitmap stands for coordinate i
    unsigned low_bits = 0;
    uint64_t bitmap_bits = 0;
    uint64_t words = 0;
};

// Appends numbers of up to 57 bits to words that are zero from that bit on.
class BitWriter {
  public:
    BitWriter(uint64_t* words, uint64_t first_bit)
        : place_(words + first_bit / 64), used_(first_bit % 64) {}

    void append(uint64_t number, unsigned bits) {
        waiting_ |= number << used_;
        used_ += bits;
        if (used_ >= 64) {
            *place_++ |= waiting_;
            used_ -= 64;
            waiting_ = number >> (bits - used_);
        }
    }
    void finish() {
        if (waiting_) *place_ |= waiting_;
    }
    // How many words hold what was appended to them.

  private:
    uint64_t* place_;       // where the next bits go
    unsigned used_;         // the bits of that word before them
    uint64_t waiting_ = 0;  // what is not written yet
};

// Four numbers of up to 14 bits are appended at once.
template <class Index>
void pack_lows(Packing packing, const Index* indices, uint64_t* words) {
    const unsigned bits = packing.low_bits;
    const auto low = [&](uint64_t i) { return uint64_t(indices[i]) & packing.low_mask(); };
    BitWriter writer(words, packing.bitmap_bits);
    uint64_t i = 0;
    for (; bits <= 14 && i + 4 <= packing.count; i += 4) {
        const uint64_t two = low(i) | low(i + 1) << bits;
        const uint64_t others = low(i + 2) | low(i + 3) << bits;
        writer.append(two | others << 2 * bits, 4 * bits);
    }
    for (; i < packing.count; ++i) writer.append(low(i), bits);
    writer.finish();
}

// Returns a word with the bits that 64 bytes tell, each 0 or 1.
inline uint64_t word_of(const uint8_t* flags) {
    static_assert(std::endian::native == std::endian::little);
    uint64_t word = 0;
    for (int j = 0; j < 8; ++j) {
        uint64_t eight;
        std::memcpy(&eight, flags + 8 * j, sizeof eight);
        word |= (eight * 0x0102040810204080 >> 56) << 8 * j;  // byte i moves to bit 56 + i
    }
    return word;
}

// Writes the bitmap, and tells whether it has a place for every index. Each bit is a byte at first:
// setting bits of words would take longer, because each waits for the one before.
template <class Index>
bool pack_bitmap(Packing packing, const Index* indices, uint64_t* words) {
    constexpr uint64_t kWindow = 4096;
    alignas(64) uint8_t flags[kWindow];
    uint64_t i = 0;
    for (uint64_t begin = 0; begin < packing.bitmap_bits; begin += kWindow) {
        const uint64_t bits = std::min(kWindow, packing.bitmap_bits - begin);
        std::memset(flags, 0, sizeof flags);
        for (; i < packing.count; ++i) {
            const uint64_t high = uint64_t(indices[i]) >> packing.low_bits;
            const uint64_t bit = packing.bit_of(high, i) - begin;
            if (bit >= bits) break;
            flags[bit] = 1;
        }
        for (uint64_t bit = 0; bit < bits; bit += 64) *words++ = word_of(flags + bit);
    }
    return i == packing.count;
}

// Writes all words, and tells whether the bitmap has a place for every index.
template <class Index>
bool pack_indices(Packing packing, const Index* indices, uint64_t* words) {
    std::fill(words + packing.bitmap_words(), words + packing.words, 0);
    if (!pack_bitmap(packing, indices, words)) return false;
    if (packing.low_bits) pack_lows(packing, indices, words);
    return true;
}

// Adds the low bits of the indices from `begin` to `end`; four of up to 14 bits are read at once.
template <class Index>
void unpack_lows(Packing packing, const uint64_t* words, uint64_t begin, uint64_t end,
                 Index* indices) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(words);
    const uint64_t last = 8 * packing.words - 8, mask = packing.low_mask();
    uint64_t bit = packing.bitmap_bits + begin * packing.low_bits;
    const auto read = [&](unsigned bits) {
        const uint64_t byte = std::min(bit / 8, last);
        uint64_t number;
        std::memcpy(&number, bytes + byte, sizeof number);
        number >>= bit - 8 * byte;
        bit += bits;
        return number;
    };
    using Four [[gnu::vector_size(4 * sizeof(uint64_t))]] = uint64_t;
    using Indices [[gnu::vector_size(4 * sizeof(Index))]] = Index;
    const uint64_t l = packing.low_bits;
    const Four shifts = {0, l, 2 * l, 3 * l};
    uint64_t i = begin;
    for (; l <= 14 && i + 4 <= end; i += 4) {
        const Four low = (Four{} + read(4 * l)) >> shifts & mask;
        Indices four;
        std::memcpy(&four, indices + i, sizeof four);
        four |= __builtin_convertvector(low, Indices);
        std::memcpy(indices + i, &four, sizeof four);
    }
    for (; i < end; ++i) indices[i] |= Index(read(l) & mask);
}

// Row `byte` has, for each bit that is set in a byte, how many below it are not.
template <class Number>
struct ZerosBelow {
    Number rows[256][8] = {};

    constexpr ZerosBelow() {
        for (int byte = 0; byte < 256; ++byte) {
            int ones = 0;
            for (int bit = 0; bit < 8; ++bit) {
                if (byte >> bit & 1) rows[byte][ones] = Number(bit - ones), ++ones;
            }
        }
    }
};
template <class Number>
constexpr ZerosBelow<Number> kZerosBelow;

// Writes the high bits of the indices whose bits a word of the bitmap holds, the first of which is
// the i-th, and returns the number of the next. Each byte writes eight, as a register holds them;
// those after the last are overwritten.
template <class Index>
uint64_t unpack_word(Packing packing, uint64_t bits, uint64_t first_bit, uint64_t i,
                     Index* indices) {
    using Unsigned = std::make_unsigned_t<Index>;
    using Eight [[gnu::vector_size(8 * sizeof(Index))]] = Unsigned;
    // A plain bitmap has no bits but those of coordinates, so that ones count as well as zeros.
    const Eight ones = packing.plain ? Eight{0, 1, 2, 3, 4, 5, 6, 7} : Eight{};
    for (int byte = 0; byte < 8; ++byte, bits >>= 8, first_bit += 8) {
        Eight zeros;
        std::memcpy(&zeros, kZerosBelow<Unsigned>.rows[bits & 0xff], sizeof zeros);
        const Eight start = Eight{} + Unsigned(packing.high_of(first_bit, i)) + ones;
        const Eight eight = (start + zeros) << packing.low_bits;
        std::memcpy(indices + i, &eight, sizeof eight);
        i += uint64_t(std::popcount(bits & 0xff));
    }
    return i;
}

// The entries past the last index that `unpack_indices` may write to.
constexpr size_t kUnpackSlack = 8;

// Reads the words of a packing, and tells whether their bitmap has as many bits as there are
// indices; garbage may give indices that are out of order or range.
template <class Index>
bool unpack_indices(Packing packing, const uint64_t* words, Index* indices) {
    const uint64_t count = packing.bitmap_words();
    const auto bitmap = [&](uint64_t word) {
        const bool whole = word + 1 < count || packing.bitmap_bits % 64 == 0;
        return whole ? words[word] : words[word] & ((uint64_t{1} << packing.bitmap_bits % 64) - 1);
    };
    uint64_t found = 0;
    for (uint64_t word = 0; word < count; ++word) found += uint64_t(std::popcount(bitmap(word)));
    if (found != packing.count) return false;

    constexpr uint64_t kWords = 64;  // whose indices stay in the cache until they get low bits
    for (uint64_t word = 0, i = 0, whole = 0; word < count;) {
        for (const uint64_t end = std::min(count, word + kWords); word < end; ++word) {
            i = unpack_word(packing, bitmap(word), 64 * word, i, indices);
        }
        const uint64_t end = word < count ? i / 4 * 4 : i;
        if (packing.low_bits) unpack_lows(packing, words, whole, end, indices);
        whole = end;
    }
    return true;
}

}  // namespace sparcel
