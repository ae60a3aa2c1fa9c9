// Which elements of a block of weights belong to each class, and where they lie in it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __BMI2__
#include <immintrin.h>
#endif

#include "simd/delta.hpp"

namespace sparcel {
namespace {

inline uint64_t first_bits(size_t n) { return n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0}; }

// Returns the place of the bit that has `rank` bits of the word below it.
inline unsigned place_of(uint64_t word, uint64_t rank) {
#ifdef __BMI2__
    return unsigned(_tzcnt_u64(_pdep_u64(uint64_t{1} << rank, word)));
#else
    for (; rank; --rank) word &= word - 1;
    return unsigned(std::countr_zero(word));
#endif
}

constexpr size_t kWords = kCodedTogether / 64;  // a bit for each element of a block

// Asks for the memory of elements that are read soon: processors fetch ahead within a page only,
// and a block is a page of two-byte elements.
template <class Word>
void fetch(const Word* x, size_t n) {
    const auto* bytes = reinterpret_cast<const char*>(x);
    for (size_t i = 0; i < n * sizeof(Word); i += 64) __builtin_prefetch(bytes + i);
}

// Lists the places of a block whose bits are set, and returns how many; there is room for three
// more. Of each word, four are listed before a branch asks for more: most words have fewer.
inline size_t places_of(const uint64_t* words, uint16_t* places) {
    size_t found = 0;
    for (unsigned word = 0; word < kWords; ++word) {
        uint64_t rest = words[word];
        const size_t end = found + size_t(std::popcount(rest));
        do {
            for (int i = 0; i < 4; ++i, rest &= rest - 1)
                places[found++] = uint16_t(64 * word + unsigned(std::countr_zero(rest)));
        } while (rest);
        found = end;
    }
    return found;
}

// Which elements of a block belong to each class: a bit for each element, and counts.
template <class Sixty4>
class Members {
  public:
    Members(BitLayout layout, const Classes& classes)
        : shift_(layout.exponent_shift() + 1), classes_(classes.count) {
        std::copy(classes.limits, classes.limits + kMostClasses - 1, limits_);
    }

    // Elements after the n-th belong to no class. With one class, nothing is looked at.
    template <class Word>
    void find(const Word* x, size_t n) {
        counts_[0] = uint16_t(n);
        if (classes_ == 1) return;
        size_t word = 0;
        for (; 64 * (word + 1) <= n; ++word) find_word(x + 64 * word, ~uint64_t{0}, word);
        if (64 * word < n) {
            Word padded[64] = {};
            std::memcpy(padded, x + 64 * word, (n - 64 * word) * sizeof(Word));
            find_word(padded, first_bits(n - 64 * word), word);
            ++word;
        }
        for (; word < kWords; ++word) {
            for (auto& of_class : bits_) of_class[word] = 0;
        }
        for (unsigned c = 0; c < classes_; ++c) {
            uint16_t count = 0;
            for (size_t i = 0; i < kWords; ++i) {
                before_[c][i] = count;
                count = uint16_t(count + std::popcount(bits_[c][i]));
            }
            counts_[c] = count;
        }
    }

    // How many elements of the block are in a class.
    uint16_t count(unsigned c) const { return counts_[c]; }

    // The class of an element: limits that are not used are 0.
    template <class Word>
    unsigned class_of(Word bits) const {
        const auto exponent = uint8_t(Word(bits << 1) >> shift_);
        unsigned c = 0;
        for (const uint8_t limit : limits_) c += exponent < limit;
        return c;
    }

    // How many elements of its class are before an element.
    size_t rank(unsigned c, size_t place) const {
        if (classes_ == 1) return place;
        const uint64_t below = bits_[c][place / 64] & first_bits(place % 64);
        return before_[c][place / 64] + size_t(std::popcount(below));
    }

    // The place of the element with a rank. The word that it is in is computed, not branched on.
    size_t place(unsigned c, uint16_t rank) const {
        uint16_t words = 0;
        for (const uint16_t before : before_[c]) words += uint16_t(before <= rank);
        const size_t word = words - 1u;
        return 64 * word + place_of(bits_[c][word], uint16_t(rank - before_[c][word]));
    }

  private:
    // All elements reach limits that are not used, and the classes after these have none.
    template <class Word>
    void find_word(const Word* x, uint64_t all, size_t word) {
        const auto exponents = Sixty4::of_exponents(x, shift_);
        uint64_t above = 0;
        for (unsigned c = 0; c + 1 < kMostClasses; ++c) {
            const uint64_t reaching = exponents.reaching(limits_[c]) & all;
            bits_[c][word] = reaching & ~above;
            above = reaching;
        }
        bits_[kMostClasses - 1][word] = all & ~above;
    }

    unsigned shift_, classes_;
    uint8_t limits_[kMostClasses - 1];
    uint16_t counts_[kMostClasses];
    uint16_t before_[kMostClasses][kWords];  // elements of the class in the words before
    uint64_t bits_[kMostClasses][kWords];
};

}  // namespace
}  // namespace sparcel
