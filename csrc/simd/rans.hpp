// Entropy coding: adaptive models of sixteen symbols, and rANS (range asymmetric numeral systems,
// Duda 2009, arXiv 0902.0271 and 1311.2540), which codes symbols in as many bits as they are
// surprising.
//
// The state of rANS is a number: coding a symbol of probability p divides it by p. The last symbol
// coded is decoded first, so a writer records the symbols of a chunk, and codes them from the end.
//
// Everything is in an anonymous namespace, since files for several instruction sets include it.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/delta.hpp"

namespace sparcel {
namespace {

constexpr unsigned kScaleBits = 15;  // probabilities are counted in units of 2^-15
constexpr unsigned kSymbols = 16;
constexpr uint32_t kLeastState = uint32_t{1} << 16;

// Row s has the bounds of the symbols if all were s but for a small share of each.
struct Targets {
    int16_t rows[kSymbols][kSymbols] = {};

    constexpr Targets() {
        constexpr int kShare = 4;
        for (int s = 0; s < int(kSymbols); ++s) {
            for (int i = 0; i < int(kSymbols); ++i) {
                const int below = i * kShare;
                const int above = (1 << kScaleBits) - (int(kSymbols) - i) * kShare;
                rows[s][i] = int16_t(i <= s ? below : above);
            }
        }
    }
};
inline constexpr Targets kTargets;

// How probable each of sixteen symbols is, as learned from those before. No symbol ever becomes
// impossible: two bounds move towards targets that differ, by the same share.
class alignas(64) Model {
  public:
    Model() {
        for (unsigned i = 0; i < kSymbols; ++i) bounds_[i] = int16_t(i << (kScaleBits - 4));
    }

    uint32_t start(unsigned symbol) const { return uint32_t(bounds_[symbol]); }
    uint32_t share(unsigned symbol) const {
        const uint32_t end = symbol + 1 < kSymbols ? start(symbol + 1) : 1u << kScaleBits;
        return end - start(symbol);
    }

    // Returns the symbol in whose share a number below 2^15 lies.
    unsigned find(uint32_t number) const {
#ifdef __SSE2__
        const __m128i wanted = _mm_set1_epi16(int16_t(number));
        const auto* bounds = reinterpret_cast<const __m128i*>(bounds_);
        const __m128i low = _mm_cmpgt_epi16(_mm_load_si128(bounds), wanted);
        const __m128i high = _mm_cmpgt_epi16(_mm_load_si128(bounds + 1), wanted);
        const auto above = unsigned(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
        return unsigned(std::countr_zero(above | 1u << kSymbols)) - 1;
#else
        unsigned symbol = 0;
        for (unsigned i = 1; i < kSymbols; ++i) symbol += uint32_t(bounds_[i]) <= number;
        return symbol;
#endif
    }

    // The first symbols count more than later ones.
    void learn(unsigned symbol) {
        using Lanes [[gnu::vector_size(2 * kSymbols)]] = int16_t;
        Lanes bounds, target;
        std::memcpy(&bounds, bounds_, sizeof bounds);
        std::memcpy(&target, kTargets.rows[symbol], sizeof target);
        bounds += (target - bounds) >> int16_t(rate_);
        std::memcpy(bounds_, &bounds, sizeof bounds);
        seen_ += seen_ < kLearned;
        rate_ = uint8_t(1 + std::bit_width(unsigned(seen_)));
    }

  private:
    static constexpr uint8_t kLearned = 63;

    int16_t bounds_[kSymbols];
    uint8_t seen_ = 1;
    uint8_t rate_ = 2;
};

// Decodes symbols. Reading past the end gives what lies there: a symbol takes two bytes at most, so
// whoever checks `past_end` after a few needs a little slack only.
class SymbolReader {
  public:
    explicit SymbolReader(CodedBytes coded) : place_(coded.begin), end_(coded.end) {
        if (end_ - place_ < ptrdiff_t(sizeof state_)) {
            place_ = end_ + 1;  // so that this is an error
        } else {
            std::memcpy(&state_, place_, sizeof state_);
            place_ += sizeof state_;
        }
    }

    unsigned read(Model& model) {
        const uint32_t number = state_ & ((1u << kScaleBits) - 1);
        const unsigned symbol = model.find(number);
        state_ = model.share(symbol) * (state_ >> kScaleBits) + number - model.start(symbol);
        uint16_t next;
        std::memcpy(&next, place_, sizeof next);
        const bool low = state_ < kLeastState;
        state_ = low ? state_ << 16 | next : state_;
        place_ += low ? sizeof next : 0;
        model.learn(symbol);
        return symbol;
    }

    bool past_end() const { return place_ > end_; }
    bool finished() const { return place_ == end_ && state_ == kLeastState; }

  private:
    const uint8_t* place_;
    const uint8_t* end_;
    uint32_t state_ = 0;
};

// Records symbols in the order in which they are decoded, in memory of the caller's; `code` then
// codes them.
class SymbolRecorder {
  public:
    explicit SymbolRecorder(uint32_t* records) : begin_(records), next_(records) {}

    [[gnu::always_inline]] void record(Model& model, unsigned symbol) {
        *next_++ = model.share(symbol) << 16 | model.start(symbol);
        model.learn(symbol);
    }

    size_t most_bytes() const { return 2 * size_t(next_ - begin_) + sizeof(uint32_t); }

  private:
    friend class SymbolCoder;

    uint32_t* begin_;
    uint32_t* next_;
};

// Codes recorded symbols, backwards from the end of memory of `most_bytes`.
class SymbolCoder {
  public:
    SymbolCoder(const SymbolRecorder& recorded, uint8_t* end)
        : begin_(recorded.begin_), record_(recorded.next_), end_(end) {}

    size_t left() const { return size_t(record_ - begin_); }

    void code_one() {
        const uint32_t coded = *--record_, start = coded & 0xffff, share = coded >> 16;
        const uint16_t low = uint16_t(state_);
        const unsigned full = state_ >= share << (32 - kScaleBits);  // nothing branches on it
        std::memcpy(end_ - sizeof low, &low, sizeof low);
        end_ -= full * sizeof low;
        state_ >>= 16 * full;
        // state / share, rounded down. The inverse does not depend on the state, so divisions
        // overlap.
        const auto inverse = uint64_t(int64_t(0x1p62 * (1 + 0x1p-50) / int32_t(share))) + 1;
        const auto quotient =
            uint32_t((unsigned __int128)(inverse) * (uint64_t(state_) << 2) >> 64);
        state_ += quotient * ((1u << kScaleBits) - share) + start;
    }

    // Writes the state, and returns where the code begins.
    uint8_t* finish() {
        end_ -= sizeof state_;
        std::memcpy(end_, &state_, sizeof state_);
        return end_;
    }

  private:
    const uint32_t* begin_;
    const uint32_t* record_;
    uint8_t* end_;
    uint32_t state_ = kLeastState;
};

// Records plain bits, up to 56 at once, in memory of the caller's; eight bytes are written each
// time.
class BitRecorder {
  public:
    explicit BitRecorder(uint8_t* bytes) : next_(bytes) {}

    void record(uint64_t number, unsigned count) {
        waiting_ |= number << used_;
        used_ += count;
        std::memcpy(next_, &waiting_, sizeof waiting_);
        next_ += used_ / 8;
        waiting_ = waiting_ >> (used_ & ~7u);
        used_ %= 8;
    }

    // Records a bit, which is written with what comes next: so many fewer may come at once.
    void record_bit(bool bit) { waiting_ |= uint64_t{bit} << used_++; }

    // Fills the last byte with zeros, and returns where it ends.
    uint8_t* finish() {
        std::memcpy(next_, &waiting_, sizeof waiting_);
        return next_ + (used_ + 7) / 8;
    }

  private:
    uint8_t* next_;
    uint64_t waiting_ = 0;
    unsigned used_ = 0;
};

// Reads plain bits, up to 57 at once, eight bytes at a time.
class BitReader {
  public:
    explicit BitReader(CodedBytes coded)
        : begin_(coded.begin), bits_(8 * size_t(coded.end - coded.begin)) {}

    uint64_t read(unsigned count) {
        uint64_t word;
        std::memcpy(&word, begin_ + bit_ / 8, sizeof word);
        word >>= bit_ % 8;
        bit_ += count;
        return word & ((uint64_t{1} << count) - 1);
    }

    bool past_end() const { return bit_ > bits_; }
    bool finished() const { return bit_ <= bits_ && bits_ - bit_ < 64; }

  private:
    const uint8_t* begin_;
    size_t bits_;
    size_t bit_ = 0;
};

}  // namespace
}  // namespace sparcel
