// Vector types of AVX-512 (F, BW, DQ, VL).
//
// Survivors are compressed in a register and the whole register is stored: a compressing store to
// memory is microcoded on Zen 4 and several times slower.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "simd/bits.hpp"

namespace sparcel {
namespace {

template <class StorageT>
struct Avx512Words {
    using Storage = StorageT;
    using Key = uint32_t;
    using Register = __m512i;
    using Mask = __mmask16;
    static constexpr size_t lanes = 16;

    Register bits;

    static Register broadcast(Key key) { return _mm512_set1_epi32(int(key)); }
    static Register limit(Key threshold) { return broadcast(threshold); }
    Register magnitude() const {
        return _mm512_and_si512(bits, broadcast(Bits<Storage>::magnitude));
    }
    Mask reaching(Register limit) const { return _mm512_cmpge_epu32_mask(magnitude(), limit); }
    static bool any(Mask a, Mask b, Mask c, Mask d) { return (a | b | c | d) != 0; }

    size_t emit(Mask mask, uint32_t base, Key* keys, uint32_t* positions) const {
        const Register lane =
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const Register position = _mm512_add_epi32(_mm512_set1_epi32(int(base)), lane);
        _mm512_storeu_si512(keys, _mm512_maskz_compress_epi32(mask, bits));
        _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(mask, position));
        return size_t(__builtin_popcount(mask));
    }

    Register larger(Register most) const { return _mm512_max_epu32(most, magnitude()); }
    static Key largest_lane(Register most) { return _mm512_reduce_max_epu32(most); }
    void keep_larger(Register& most, Register& place, Register here) const {
        const Mask more = _mm512_cmpgt_epu32_mask(magnitude(), most);
        most = _mm512_mask_mov_epi32(most, more, magnitude());
        place = _mm512_mask_mov_epi32(place, more, here);
    }
};

struct Vector16 : Avx512Words<uint16_t> {
    static Vector16 load(const uint16_t* x) {
        const auto* address = reinterpret_cast<const __m256i*>(x);
        return {{_mm512_cvtepu16_epi32(_mm256_loadu_si256(address))}};
    }
    static Vector16 load_first(const uint16_t* x, size_t n) {
        return {{_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(Mask((1u << n) - 1), x))}};
    }
};

struct Vector32 : Avx512Words<uint32_t> {
    using Float = float;

    static Vector32 load(const uint32_t* x) { return {{_mm512_loadu_si512(x)}}; }
    static Vector32 load_first(const uint32_t* x, size_t n) {
        return {{_mm512_maskz_loadu_epi32(Mask((1u << n) - 1), x)}};
    }
    static Vector32 load_float(const float* x) { return {{_mm512_loadu_si512(x)}}; }
    static Vector32 add(Vector32 a, Vector32 b) {
        const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(a.bits), _mm512_castsi512_ps(b.bits));
        return {{_mm512_castps_si512(sum)}};
    }
    static Vector32 multiply(Vector32 a, float b) {
        const __m512 product = _mm512_mul_ps(_mm512_castsi512_ps(a.bits), _mm512_set1_ps(b));
        return {{_mm512_castps_si512(product)}};
    }
    void store(float* x) const { _mm512_storeu_si512(x, bits); }
    static uint64_t word(Mask mask) { return mask; }
    size_t compress(uint64_t which, float* x) const {
        _mm512_storeu_si512(x, _mm512_maskz_compress_epi32(Mask(which), bits));
        return size_t(__builtin_popcountll(which));
    }
    static Vector32 expand(uint64_t which, const float* x) {
        return {{_mm512_maskz_expand_epi32(Mask(which), _mm512_loadu_si512(x))}};
    }
    Vector32 where(uint64_t which, Vector32 other) const {
        return {{_mm512_mask_mov_epi32(bits, Mask(which), other.bits)}};
    }
    void stream(float* x) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(x), bits); }
    static void fence() { _mm_sfence(); }
};

struct Vector64 {
    using Storage = uint64_t;
    using Float = double;
    using Key = uint64_t;
    using Register = __m512i;
    using Mask = __mmask8;
    static constexpr size_t lanes = 8;

    Register bits;

    static Register broadcast(Key key) { return _mm512_set1_epi64(static_cast<long long>(key)); }
    static Register limit(Key threshold) { return broadcast(threshold); }
    static Vector64 load(const uint64_t* x) { return {_mm512_loadu_si512(x)}; }
    static Vector64 load_first(const uint64_t* x, size_t n) {
        return {_mm512_maskz_loadu_epi64(Mask((1u << n) - 1), x)};
    }
    static Vector64 load_float(const double* x) { return {_mm512_loadu_si512(x)}; }
    Register magnitude() const {
        return _mm512_and_si512(bits, broadcast(Bits<Storage>::magnitude));
    }
    Mask reaching(Register limit) const { return _mm512_cmpge_epu64_mask(magnitude(), limit); }
    static bool any(Mask a, Mask b, Mask c, Mask d) { return (a | b | c | d) != 0; }

    size_t emit(Mask mask, uint32_t base, Key* keys, uint32_t* positions) const {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i position = _mm256_add_epi32(_mm256_set1_epi32(int(base)), lane);
        _mm512_storeu_si512(keys, _mm512_maskz_compress_epi64(mask, bits));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions),
                            _mm256_maskz_compress_epi32(mask, position));
        return size_t(__builtin_popcount(mask));
    }

    static Vector64 add(Vector64 a, Vector64 b) {
        const __m512d sum = _mm512_add_pd(_mm512_castsi512_pd(a.bits), _mm512_castsi512_pd(b.bits));
        return {_mm512_castpd_si512(sum)};
    }
    static Vector64 multiply(Vector64 a, double b) {
        const __m512d product = _mm512_mul_pd(_mm512_castsi512_pd(a.bits), _mm512_set1_pd(b));
        return {_mm512_castpd_si512(product)};
    }
    void store(double* x) const { _mm512_storeu_si512(x, bits); }
    void stream(double* x) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(x), bits); }
    static void fence() { _mm_sfence(); }
    Register larger(Register most) const { return _mm512_max_epu64(most, magnitude()); }
    static Key largest_lane(Register most) { return _mm512_reduce_max_epu64(most); }
    void keep_larger(Register& most, Register& place, Register here) const {
        const Mask more = _mm512_cmpgt_epu64_mask(magnitude(), most);
        most = _mm512_mask_mov_epi64(most, more, magnitude());
        place = _mm512_mask_mov_epi64(place, more, here);
    }
};

}  // namespace
}  // namespace sparcel
