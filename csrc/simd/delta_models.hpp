// How the changes of weights are made of symbols: gaps between them, and steps or values.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "simd/delta.hpp"
#include "simd/rans.hpp"

namespace sparcel {
namespace {

// Codes the numbers of unchanged elements between changed ones. A gap's quotient by a power of two
// near the mean of the gaps before is a symbol, and its remainder plain bits: gaps of any mean, and
// of one that changes, take close to their entropy.
class Gaps {
  public:
    uint64_t read(SymbolReader& symbols, BitReader& bits) {
        const unsigned shift = this->shift();
        uint64_t gap = symbols.read(models_[shift]);
        if (gap < kMore) [[likely]] {
            gap = gap << shift | bits.read(shift);
        } else {
            const auto width = unsigned(bits.read(kWidthBits));
            gap = (kMore << shift) + (uint64_t{1} << width % 32) - 1 + bits.read(width % 32);
        }
        follow(gap);
        return gap;
    }

    [[gnu::always_inline]] void record(SymbolRecorder& symbols, BitRecorder& bits, uint64_t gap) {
        const unsigned shift = this->shift();
        const uint64_t quotient = gap >> shift;
        if (quotient < kMore) {
            symbols.record(models_[shift], unsigned(quotient));
            bits.record(gap & ((uint64_t{1} << shift) - 1), shift);
        } else {
            symbols.record(models_[shift], kMore);
            const uint64_t rest = gap - (kMore << shift) + 1;
            const unsigned width = unsigned(std::bit_width(rest)) - 1;
            bits.record(width, kWidthBits);
            bits.record(rest - (uint64_t{1} << width), width);
        }
        follow(gap);
    }

  private:
    static constexpr unsigned kMostShift = 16, kWidthBits = 5;
    static constexpr uint64_t kMore = kSymbols - 1;

    unsigned shift() const {
        const int width = int(std::bit_width(sum_ >> 4)) - 2;
        return unsigned(std::clamp(width, 0, int(kMostShift)));
    }
    void follow(uint64_t gap) { sum_ += gap - (sum_ >> 4); }

    uint64_t sum_ = 0;  // sixteen times the mean of the last gaps, about
    Model models_[kMostShift + 1];
};

// Codes steps other than 0: magnitudes up to 3 are symbols, larger ones have a symbol for each
// number of bits.
template <class Word>
class Steps {
  public:
    Word read(SymbolReader& symbols, BitReader& bits) {
        unsigned width = symbols.read(model_);
        uint64_t magnitude = width + 1;
        if (width >= kWide) [[unlikely]] {
            if (width == kSymbols - 1) width += unsigned(bits.read(kWidthBits));
            magnitude = high_bit(width - 1) | wide(bits, width - 1);
        }
        const uint64_t down = -bits.read(1);  // all ones, or 0: signs are as good as random
        return Word((magnitude ^ down) - down);
    }

    [[gnu::always_inline]] void record(SymbolRecorder& symbols, BitRecorder& bits, Word step) {
        const bool down = step >> (8 * sizeof(Word) - 1);
        const uint64_t magnitude = down ? Word(-step) : step;
        if (magnitude <= kWide) {
            symbols.record(model_, unsigned(magnitude) - 1);
        } else {
            const unsigned width = unsigned(std::bit_width(magnitude));
            symbols.record(model_, std::min(width, kSymbols - 1));
            if (width >= kSymbols - 1) bits.record(width - (kSymbols - 1), kWidthBits);
            const uint64_t low = magnitude - high_bit(width - 1);
            bits.record(low & 0xffffffff, std::min(width - 1, 32u));
            if (width > 33) bits.record(low >> 32, width - 33);
        }
        bits.record_bit(down);
    }

  private:
    static constexpr unsigned kWide = 3, kWidthBits = 6;

    static uint64_t high_bit(unsigned bit) { return uint64_t{1} << bit % 64; }
    static uint64_t wide(BitReader& bits, unsigned width) {
        const uint64_t low = bits.read(std::min(width, 32u));
        return width <= 32 ? low : low | bits.read(std::min(width - 32, 32u)) << 32;
    }

    Model model_;
};

// Codes new values: the first eight bits, a sign and an exponent or most of it, as two symbols, and
// the rest as they are.
template <class Word>
class Values {
  public:
    Word read(SymbolReader& symbols, BitReader& bits) {
        const unsigned high = symbols.read(high_);
        const unsigned low = symbols.read(low_[high]);
        return Word(uint64_t(high << 4 | low) << kPlain | bits.read(kPlain));
    }

    [[gnu::always_inline]] void record(SymbolRecorder& symbols, BitRecorder& bits, Word value) {
        const unsigned high = unsigned(value >> (kPlain + 4)), low = value >> kPlain & 0xf;
        symbols.record(high_, high);
        symbols.record(low_[high], low);
        bits.record(value & ((uint64_t{1} << kPlain) - 1), kPlain);
    }

  private:
    static constexpr unsigned kPlain = 8 * sizeof(Word) - 8;

    Model high_;
    Model low_[kSymbols];
};

// Codes the steps of nibbles, modulo 16. Most go to a neighbour, but the ends of what four bits
// tell, a magnitude with a sign or a number, have one neighbour only: their last three bits are all
// 0 or all 1, and they have models of their own.
class Nibbles {
  public:
    unsigned read(SymbolReader& symbols, unsigned before) {
        return (before + symbols.read(model_of(before))) % kSymbols;
    }

    [[gnu::always_inline]] void record(SymbolRecorder& symbols, unsigned before, unsigned after) {
        symbols.record(model_of(before), (after - before) % kSymbols);
    }

  private:
    Model& model_of(unsigned nibble) { return models_[(nibble % 8 > 0) + (nibble % 8 == 7)]; }

    Model models_[3];
};

// The bits of floats in an order that is that of their values, and back: neighbours differ by one
// unit in the last place, and so do −0 and 0. Signs are as good as random, so nothing branches.
template <class Word>
Word ordered(Word bits, bool floats) {
    using Signed = std::make_signed_t<Word>;
    constexpr unsigned kSign = 8 * sizeof(Word) - 1;
    const Word negative = Word(Signed(bits) >> kSign);  // all ones, or 0
    return floats ? Word(bits ^ (negative | Word(Word(1) << kSign))) : bits;
}
template <class Word>
Word unordered(Word order, bool floats) {
    using Signed = std::make_signed_t<Word>;
    constexpr unsigned kSign = 8 * sizeof(Word) - 1;
    const Word positive = Word(Signed(order) >> kSign);
    return floats ? Word(order ^ (Word(~positive) | Word(Word(1) << kSign))) : order;
}

// The steps between values whose last bits, `shift` of them, are 0: those bits do not count.
template <class Word>
Word step_between(Word before, Word after, bool floats, unsigned shift) {
    return Word((ordered(after, floats) >> shift) - (ordered(before, floats) >> shift));
}
template <class Word>
Word stepped(Word before, Word step, bool floats, unsigned shift) {
    const Word order = Word(Word((ordered(before, floats) >> shift) + step) << shift);
    return Word(unordered(order, floats) >> shift << shift);
}

// What an element adds to the sum of a tensor, by SplitMix64's finaliser (Steele, Lea and Flood
// 2014). Sums of such numbers tell versions apart, whatever the order of their terms.
inline uint64_t hashed(uint64_t key, uint64_t number, uint64_t bits) {
    uint64_t x = key + number * 0x9e3779b97f4a7c15 + bits * 0xd1342543de82ef95;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

}  // namespace
}  // namespace sparcel
