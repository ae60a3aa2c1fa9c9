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

// Which of 64 lanes have all bits set; lanes of 1, 2, 4 and 8 bytes fill 2, 4, 8 and 16 registers.
inline uint64_t bits_of_lanes(const __m256i (&lanes)[2]) {
    return uint32_t(_mm256_movemask_epi8(lanes[0])) |
           uint64_t(uint32_t(_mm256_movemask_epi8(lanes[1]))) << 32;
}
inline uint64_t bits_of_lanes(const __m256i (&lanes)[4]) {
    __m256i bytes[2];
    for (int i = 0; i < 2; ++i) {
        // Packing takes the halves of its operands in turn.
        const __m256i packed = _mm256_packs_epi16(lanes[2 * i], lanes[2 * i + 1]);
        bytes[i] = _mm256_permute4x64_epi64(packed, 0b11011000);
    }
    return bits_of_lanes(bytes);
}
inline uint64_t bits_of_lanes(const __m256i (&lanes)[8]) {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) {
        word |= uint64_t(_mm256_movemask_ps(_mm256_castsi256_ps(lanes[i]))) << 8 * i;
    }
    return word;
}
inline uint64_t bits_of_lanes(const __m256i (&lanes)[16]) {
    uint64_t word = 0;
    for (int i = 0; i < 16; ++i) {
        word |= uint64_t(_mm256_movemask_pd(_mm256_castsi256_pd(lanes[i]))) << 4 * i;
    }
    return word;
}

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
        return ~bits_of_lanes(below);
    }

    // Which of 64 elements differ.
    template <class Word>
    static uint64_t differing(const Word* a, const Word* b) {
        using Words [[gnu::vector_size(32)]] = Word;
        constexpr int registers = 2 * sizeof(Word), lanes = 64 / registers;
        __m256i same[registers];
        for (int i = 0; i < registers; ++i) {
            same[i] = __m256i(Words(load256(a + i * lanes)) == Words(load256(b + i * lanes)));
        }
        return ~bits_of_lanes(same);
    }

  private:
    static __m256i signed_bytes(__m256i bytes) {
        return _mm256_xor_si256(bytes, _mm256_set1_epi8(char(0x80)));
    }
    // As in `bits_of_lanes`, but of numbers without signs.
    static __m256i narrowed(__m256i a, __m256i b) {
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0b11011000);
    }
};

}  // namespace
}  // namespace sparcel
