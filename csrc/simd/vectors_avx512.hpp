// Vector types of AVX-512 (F, BW, DQ, VL), whose masks have a bit for each lane.
//
// Survivors are compressed in a register and the whole register is stored: a compressing store to
// memory is microcoded on Zen 4 and several times slower.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "simd/vectors.hpp"

namespace sparcel {
namespace {

template <class Self, class Storage>
struct Avx512Vector : VectorLanes<Self, Storage, 64> {
    using Base = VectorLanes<Self, Storage, 64>;
    using Base::bits;
    using typename Base::Float;
    using typename Base::Register;

    void stream(Float* x) const {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(x), __m512i(bits));
    }
    static void fence() { _mm_sfence(); }
};

template <class Self, class Storage>
struct Avx512Words : Avx512Vector<Self, Storage> {
    using Base = Avx512Vector<Self, Storage>;
    using Base::bits;
    using typename Base::Register;
    using Mask = __mmask16;

    Mask reaching(Register limit) const {
        return _mm512_cmpgt_epi32_mask(__m512i(this->magnitude()), __m512i(limit));
    }
    static bool any(Mask a, Mask b, Mask c, Mask d) { return (a | b | c | d) != 0; }
    size_t emit(Mask mask, uint32_t base, uint32_t* keys, uint32_t* positions) const {
        const __m512i lane =
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i position = _mm512_add_epi32(_mm512_set1_epi32(int(base)), lane);
        _mm512_storeu_si512(keys, _mm512_maskz_compress_epi32(mask, __m512i(bits)));
        _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(mask, position));
        return size_t(__builtin_popcount(mask));
    }
};

struct Vector16 : Avx512Words<Vector16, uint16_t> {
    static Vector16 load(const uint16_t* x) {
        const auto* address = reinterpret_cast<const __m256i*>(x);
        return {{{{Register(_mm512_cvtepu16_epi32(_mm256_loadu_si256(address)))}}}};
    }
    static Vector16 load_first(const uint16_t* x, size_t n) {
        const __m256i words = _mm256_maskz_loadu_epi16(Mask((1u << n) - 1), x);
        return {{{{Register(_mm512_cvtepu16_epi32(words))}}}};
    }
};

struct Vector32 : Avx512Words<Vector32, uint32_t> {
    static Vector32 load_first(const uint32_t* x, size_t n) {
        return of(_mm512_maskz_loadu_epi32(Mask((1u << n) - 1), x));
    }
    static uint64_t word(Mask mask) { return mask; }
    size_t compress(uint64_t which, float* x) const {
        _mm512_storeu_si512(x, _mm512_maskz_compress_epi32(Mask(which), __m512i(bits)));
        return size_t(__builtin_popcountll(which));
    }
    static Vector32 expand(uint64_t which, const float* x) {
        return of(_mm512_maskz_expand_epi32(Mask(which), _mm512_loadu_si512(x)));
    }
    Vector32 where(uint64_t which, Vector32 other) const {
        return of(_mm512_mask_mov_epi32(__m512i(bits), Mask(which), __m512i(other.bits)));
    }

  private:
    static Vector32 of(__m512i words) { return {{{{Register(words)}}}}; }
};

struct Vector64 : Avx512Vector<Vector64, uint64_t> {
    using Mask = __mmask8;

    static Vector64 load_first(const uint64_t* x, size_t n) {
        return {{{Register(_mm512_maskz_loadu_epi64(Mask((1u << n) - 1), x))}}};
    }
    Mask reaching(Register limit) const {
        return _mm512_cmpgt_epi64_mask(__m512i(magnitude()), __m512i(limit));
    }
    static bool any(Mask a, Mask b, Mask c, Mask d) { return (a | b | c | d) != 0; }
    size_t emit(Mask mask, uint32_t base, uint64_t* keys, uint32_t* positions) const {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i position = _mm256_add_epi32(_mm256_set1_epi32(int(base)), lane);
        _mm512_storeu_si512(keys, _mm512_maskz_compress_epi64(mask, __m512i(bits)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions),
                            _mm256_maskz_compress_epi32(mask, position));
        return size_t(__builtin_popcount(mask));
    }
};

}  // namespace
}  // namespace sparcel
