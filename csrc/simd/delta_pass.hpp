// The passes over weights, written once over the types that each instruction set provides.
//
// A type `Sixty4` stands for the exponents of 64 elements. It has `of_exponents`, `reaching`, whose
// bits tell which reach a limit, and `differing`, whose bits tell which elements differ.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __BMI2__
#include <immintrin.h>
#endif

#include "delta.hpp"
#include "delta_models.hpp"

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

// Which elements of a block belong to each class: a bit for each element.
template <class Sixty4>
class Members {
  public:
    static constexpr size_t kWords = kCodedTogether / 64;

    Members(BitLayout layout, const Classes& classes) : shift_(layout.exponent_shift() + 1) {
        std::copy(classes.limits, classes.limits + kMostClasses - 1, limits_);
    }

    // Elements after the n-th, in whole groups of words, belong to no class.
    template <class Word>
    void find(const Word* x, size_t n) {
        size_t word = 0;
        for (; 64 * (word + 1) <= n; ++word) find_word(x + 64 * word, ~uint64_t{0}, word);
        if (64 * word < n) {
            Word padded[64] = {};
            std::memcpy(padded, x + 64 * word, (n - 64 * word) * sizeof(Word));
            find_word(padded, first_bits(n - 64 * word), word);
            ++word;
        }
        for (; word % kGroup; ++word) {
            for (auto& of_class : bits_) of_class[word] = 0;
        }
    }

    const uint64_t* of_class(unsigned c) const { return bits_[c]; }

    static constexpr size_t kGroup = 8;  // words that are counted together

  private:
    // Limits that are not used are 0: all elements reach them, and the classes after have none.
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

    unsigned shift_;
    uint8_t limits_[kMostClasses - 1];
    uint64_t bits_[kMostClasses][kWords];
};

template <class Sixty4, class Word>
class Decoding {
  public:
    Decoding(const CodedChanges& coded, Changes<Word> changes)
        : coded_(coded),
          changes_(changes),
          places_(coded.places),
          values_(coded.values),
          bits_(coded.bits),
          members_(coded.layout, coded.classes) {}

    bool run(const Piece* pieces, size_t count) {
        for (unsigned c = 0; c < coded_.classes.count; ++c) {
            left_[c] = coded_.classes.changes[c];
            if (!to_next(c)) return false;
        }
        for (size_t i = 0; i < count; base_ += uint32_t(pieces[i++].count)) {
            const auto* x = static_cast<const Word*>(pieces[i].elements);
            const size_t n = pieces[i].count;
            if (!(coded_.classes.count == 1 ? skip(x, n) : scan(x, n))) return false;
        }
        for (unsigned c = 0; c < coded_.classes.count; ++c) {
            if (skip_[c] < kNever) return false;
        }
        return places_.finished() && values_.finished() && bits_.finished();
    }

  private:
    static constexpr uint64_t kNever = uint64_t{1} << 62;

    // With one class, elements that do not change need not be looked at.
    bool skip(const Word* x, size_t n) {
        while (skip_[0] < n) {
            const size_t i = size_t(skip_[0]);
            if (!take(0, x ? x + i : nullptr, uint32_t(i))) return false;
            skip_[0] += i + 1;
        }
        skip_[0] -= n;
        return true;
    }

    bool scan(const Word* x, size_t n) {
        for (size_t i = 0; i < n; i += kCodedTogether) {
            const size_t length = std::min(kCodedTogether, n - i);
            members_.find(x + i, length);
            for (unsigned c = 0; c < coded_.classes.count; ++c) {
                if (!scan_class(c, x + i, length, uint32_t(i))) return false;
            }
        }
        return true;
    }

    // Eight words are counted together. Which of them holds a change is computed, not branched on.
    bool scan_class(unsigned c, const Word* x, size_t n, uint32_t first) {
        constexpr size_t kGroup = Members<Sixty4>::kGroup;
        uint64_t skip = skip_[c];
        const uint64_t* group = members_.of_class(c);
        for (size_t i = 0; i < n; i += 64 * kGroup, group += kGroup) {
            uint64_t counts[kGroup], there = 0;
            for (size_t j = 0; j < kGroup; ++j) {
                counts[j] = there;
                there += uint64_t(std::popcount(group[j]));
            }
            while (skip < there) {
                size_t j = 0;
                for (size_t k = 1; k < kGroup; ++k) j += counts[k] <= skip;
                const size_t place = i + 64 * j + place_of(group[j], skip - counts[j]);
                if (!take(c, x + place, first + uint32_t(place))) return false;
                skip += skip_[c] + 1;
            }
            skip -= there;
        }
        skip_[c] = skip;
        return true;
    }

    // Decodes the change of an element, and the gap to the next one of its class.
    bool take(unsigned c, const Word* old, uint32_t place) {
        changes_.places[found_] = base_ + place;
        if (coded_.steps) {
            const Word step = steps_[c].read(values_, bits_);
            changes_.after[found_] = old ? stepped(*old, step, coded_.layout.floats) : step;
        } else {
            changes_.after[found_] = whole_.read(values_, bits_);
        }
        changes_.before[found_] = old ? *old : Word{0};
        ++found_;
        return !values_.past_end() && !bits_.past_end() && to_next(c);
    }

    bool to_next(unsigned c) {
        if (left_[c] == 0) {
            skip_[c] = 2 * kNever;  // whatever a chunk takes off, more than kNever is left
            return true;
        }
        --left_[c];
        skip_[c] = gaps_[c].read(places_, bits_);
        return !places_.past_end() && !bits_.past_end();
    }

    const CodedChanges& coded_;
    Changes<Word> changes_;
    SymbolReader places_, values_;
    BitReader bits_;
    Members<Sixty4> members_;
    Gaps gaps_[kMostClasses];
    Steps<Word> steps_[kMostClasses];
    Values<Word> whole_;
    uint64_t skip_[kMostClasses];  // the elements of the class before its next change
    uint64_t left_[kMostClasses];  // the changes of the class after that
    size_t found_ = 0;
    uint32_t base_ = 0;
};

template <class Sixty4, class Word>
struct DeltaPass {
    static size_t changed(const Word* old, const Word* now, size_t n, BitLayout layout,
                          const Classes& classes, uint64_t* seen, uint32_t base,
                          Changes<Word> changes, Ranks ranks) {
        Members<Sixty4> members(layout, classes);
        size_t found = 0;
        for (size_t i = 0; i < n; i += kCodedTogether) {
            const size_t length = std::min(kCodedTogether, n - i);
            uint64_t differing[Members<Sixty4>::kWords];
            const bool any = differ(old + i, now + i, length, differing);
            if (classes.count == 1 && !any) {
                seen[0] += length;
                continue;
            }
            members.find(old + i, length);
            for (unsigned c = 0; c < classes.count; ++c) {
                const uint64_t* of_class = members.of_class(c);
                uint64_t before = seen[c];
                for (size_t j = 0; 64 * j < length; ++j) {
                    for (uint64_t rest = of_class[j] & differing[j]; rest; rest &= rest - 1) {
                        const auto bit = unsigned(std::countr_zero(rest));
                        const size_t place = i + 64 * j + bit;
                        const int below = std::popcount(of_class[j] & first_bits(bit));
                        changes.places[found] = base + uint32_t(place);
                        changes.before[found] = old[place];
                        changes.after[found] = now[place];
                        ranks.ranks[found] = uint32_t(before + uint64_t(below));
                        ranks.classes[found] = uint8_t(c);
                        ++found;
                    }
                    before += uint64_t(std::popcount(of_class[j]));
                }
                seen[c] = before;
            }
        }
        return found;
    }

    // Tells by bits which elements of a block differ, and whether any does.
    static bool differ(const Word* a, const Word* b, size_t n, uint64_t* bits) {
        uint64_t any = 0;
        size_t i = 0;
        for (; i + 64 <= n; i += 64)
            any |= * bits++ = Sixty4::template differing<Word>(a + i, b + i);
        if (i == n) return any;
        Word padded[2][64] = {};
        std::memcpy(padded[0], a + i, (n - i) * sizeof(Word));
        std::memcpy(padded[1], b + i, (n - i) * sizeof(Word));
        return any |= *bits = Sixty4::template differing<Word>(padded[0], padded[1]);
    }

    static bool decode(const CodedChanges& coded, const Piece* pieces, size_t count,
                       Changes<Word> changes) {
        return Decoding<Sixty4, Word>(coded, changes).run(pieces, count);
    }

    static uint64_t sum(const Piece& piece) {
        const auto* x = static_cast<const Word*>(piece.elements);
        uint64_t total = 0;
        for (size_t i = 0; i < piece.count; i += piece.row) {
            const uint64_t first = piece.first + i / piece.row * piece.stride;
            const size_t n = std::min<size_t>(piece.row, piece.count - i);
            for (size_t j = 0; j < n; ++j) total += hashed(piece.key, first + j, x[i + j]);
        }
        return total;
    }

    static constexpr DeltaReaders<Word> readers = {differ, changed, decode, sum};
};

template <class Sixty4>
constexpr DeltaPasses delta_passes = {
    DeltaPass<Sixty4, uint8_t>::readers, DeltaPass<Sixty4, uint16_t>::readers,
    DeltaPass<Sixty4, uint32_t>::readers, DeltaPass<Sixty4, uint64_t>::readers};

}  // namespace
}  // namespace sparcel
