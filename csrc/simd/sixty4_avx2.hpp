// 64 elements at a time with AVX2.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace sparcel {
namespace {

inline __m256i load256(const void* at) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(at));
}

// The elements of each width: how many registers they fill, and how lanes become bits.
template <class Word>
struct Lanes;

template <>
struct Lanes<uint8_t> {
    static constexpr int registers = 2;
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi8(a, b); }
    static uint64_t bits(const __m256i* lanes) {
        return uint32_t(_mm256_movemask_epi8(lanes[0])) |
               uint64_t(uint32_t(_mm256_movemask_epi8(lanes[1]))) << 32;
    }
};

template <>
struct Lanes<uint16_t> {
    static constexpr int registers = 4;
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi16(a, b); }
    static uint64_t bits(const __m256i* lanes) {
        const __m256i bytes[2] = {narrowed(lanes[0], lanes[1]), narrowed(lanes[2], lanes[3])};
        return Lanes<uint8_t>::bits(bytes);
    }

  private:
    // Packing takes the halves of its operands in turn.
    static __m256i narrowed(__m256i a, __m256i b) {
        return _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0b11011000);
    }
};

template <>
struct Lanes<uint32_t> {
    static constexpr int registers = 8;
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi32(a, b); }
    static uint64_t bits(const __m256i* lanes) {
        uint64_t word = 0;
        for (int i = 0; i < registers; ++i) {
            word |= uint64_t(_mm256_movemask_ps(_mm256_castsi256_ps(lanes[i]))) << 8 * i;
        }
        return word;
    }
};

template <>
struct Lanes<uint64_t> {
    static constexpr int registers = 16;
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi64(a, b); }
    static uint64_t bits(const __m256i* lanes) {
        uint64_t word = 0;
        for (int i = 0; i < registers; ++i) {
            word |= uint64_t(_mm256_movemask_pd(_mm256_castsi256_pd(lanes[i]))) << 4 * i;
        }
        return word;
    }
};

struct Sixty4 {
    __m256i halves[2];  // less 128, since bytes are compared with their signs

    // The first eight bits of exponents: shifts by one to the left, then by so many to the right.
    template <class Word>
    static Sixty4 of_exponents(const Word* x, unsigned shift) {
        alignas(32) uint8_t bytes[64];
        for (int i = 0; i < 64; ++i) bytes[i] = uint8_t(Word(x[i] << 1) >> shift);
        return {{signed_bytes(load256(bytes)), signed_bytes(load256(bytes + 32))}};
    }
    static Sixty4 of_exponents(const uint16_t* x, unsigned shift) {
        const __m128i count = _mm_cvtsi32_si128(int(shift));
        __m256i words[4];
        for (int i = 0; i < 4; ++i) {
            words[i] = _mm256_srl_epi16(_mm256_slli_epi16(load256(x + 16 * i), 1), count);
        }
        return {{signed_bytes(narrowed(words[0], words[1])),
                 signed_bytes(narrowed(words[2], words[3]))}};
    }

    uint64_t reaching(uint8_t limit) const {
        const __m256i least = signed_bytes(_mm256_set1_epi8(char(limit)));
        const __m256i below[2] = {_mm256_cmpgt_epi8(least, halves[0]),
                                  _mm256_cmpgt_epi8(least, halves[1])};
        return ~Lanes<uint8_t>::bits(below);
    }

    // Which of 64 elements differ.
    template <class Word>
    static uint64_t differing(const Word* a, const Word* b) {
        using Of = Lanes<Word>;
        constexpr int lanes = 64 / Of::registers;
        __m256i same[Of::registers];
        for (int i = 0; i < Of::registers; ++i) {
            same[i] = Of::equal(load256(a + i * lanes), load256(b + i * lanes));
        }
        return ~Of::bits(same);
    }

  private:
    static __m256i signed_bytes(__m256i bytes) {
        return _mm256_xor_si256(bytes, _mm256_set1_epi8(char(0x80)));
    }
    // Packing takes the halves of its operands in turn.
    static __m256i narrowed(__m256i a, __m256i b) {
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0b11011000);
    }
};

}  // namespace
}  // namespace sparcel
