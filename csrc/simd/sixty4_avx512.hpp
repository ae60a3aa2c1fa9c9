// 64 elements at a time with AVX-512 (F and BW), whose comparisons give bits.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace sparcel {
namespace {

template <class Word>
uint64_t lanes_differing(__m512i a, __m512i b) {
    if constexpr (sizeof(Word) == 1) return _mm512_cmpneq_epu8_mask(a, b);
    if constexpr (sizeof(Word) == 2) return _mm512_cmpneq_epu16_mask(a, b);
    if constexpr (sizeof(Word) == 4) return _mm512_cmpneq_epu32_mask(a, b);
    if constexpr (sizeof(Word) == 8) return _mm512_cmpneq_epu64_mask(a, b);
}

struct Sixty4 {
    __m512i bytes;

    // The first eight bits of exponents: shifts by one to the left, then by so many to the right.
    template <class Word>
    static Sixty4 of_exponents(const Word* x, unsigned shift) {
        alignas(64) uint8_t bytes[64];
        for (int i = 0; i < 64; ++i) bytes[i] = uint8_t(Word(x[i] << 1) >> shift);
        return {_mm512_loadu_si512(bytes)};
    }
    static Sixty4 of_exponents(const uint16_t* x, unsigned shift) {
        const __m128i count = _mm_cvtsi32_si128(int(shift));
        __m256i halves[2];
        for (int i = 0; i < 2; ++i) {
            const __m512i words = _mm512_slli_epi16(_mm512_loadu_si512(x + 32 * i), 1);
            halves[i] = _mm512_cvtepi16_epi8(_mm512_srl_epi16(words, count));
        }
        return {_mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1)};
    }
    uint64_t reaching(uint8_t limit) const {
        return _mm512_cmpge_epu8_mask(bytes, _mm512_set1_epi8(char(limit)));
    }

    // Which of 64 elements differ.
    template <class Word>
    static uint64_t differing(const Word* a, const Word* b) {
        constexpr int registers = sizeof(Word), lanes = 64 / registers;
        uint64_t word = 0;
        for (int i = 0; i < registers; ++i) {
            const __m512i left = _mm512_loadu_si512(a + i * lanes);
            const __m512i right = _mm512_loadu_si512(b + i * lanes);
            word |= lanes_differing<Word>(left, right) << (i * lanes);
        }
        return word;
    }
};

}  // namespace
}  // namespace sparcel
