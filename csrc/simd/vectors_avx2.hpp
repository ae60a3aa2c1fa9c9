// Vector types of AVX2. It has no compress instruction, so a table of permutations replaces it.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "simd/bits.hpp"

namespace sparcel {
namespace {

// Row `mask` moves the masked lanes of 8 to the front.
struct Permutations8 {
    alignas(64) uint8_t rows[256][8] = {};

    constexpr Permutations8() {
        for (int mask = 0; mask < 256; ++mask) {
            int place = 0;
            for (int lane = 0; lane < 8; ++lane) {
                if (mask >> lane & 1) rows[mask][place++] = uint8_t(lane);
            }
        }
    }
};

// The same for 4 lanes of 64 bits, as pairs of 32-bit lanes, and for 4 lanes of 32 bits.
struct Permutations4 {
    alignas(64) uint32_t pairs[16][8] = {};
    alignas(64) uint32_t words[16][4] = {};

    constexpr Permutations4() {
        for (int mask = 0; mask < 16; ++mask) {
            int place = 0;
            for (uint32_t lane = 0; lane < 4; ++lane) {
                if (!(mask >> lane & 1)) continue;
                words[mask][place] = lane;
                pairs[mask][2 * place] = 2 * lane;
                pairs[mask][2 * place + 1] = 2 * lane + 1;
                ++place;
            }
        }
    }
};

// Row `mask` moves the first lanes of 8 to the masked ones.
struct Expansions8 {
    alignas(64) uint8_t rows[256][8] = {};

    constexpr Expansions8() {
        for (int mask = 0; mask < 256; ++mask) {
            int place = 0;
            for (int lane = 0; lane < 8; ++lane) {
                rows[mask][lane] = uint8_t(place);
                place += mask >> lane & 1;
            }
        }
    }
};

constexpr Permutations8 kPermutations8;
constexpr Expansions8 kExpansions8;
constexpr Permutations4 kPermutations4;

template <class StorageT>
struct Avx2Words {
    using Storage = StorageT;
    using Key = uint32_t;
    using Register = __m256i;
    using Mask = Register;
    static constexpr size_t lanes = 8;

    Register bits;

    // AVX2 compares signed integers only; magnitudes have no sign bit.
    static Register broadcast(Key key) { return _mm256_set1_epi32(int(key)); }
    static Register limit(Key threshold) { return broadcast(threshold - 1); }
    Register magnitude() const {
        return _mm256_and_si256(bits, broadcast(Bits<Storage>::magnitude));
    }
    Mask reaching(Register limit) const { return _mm256_cmpgt_epi32(magnitude(), limit); }
    static bool any(Mask a, Mask b, Mask c, Mask d) {
        const Mask all = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
        return !_mm256_testz_si256(all, all);
    }

    size_t emit(Mask mask, uint32_t base, Key* keys, uint32_t* positions) const {
        const unsigned which = unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
        const auto* row = reinterpret_cast<const __m128i*>(kPermutations8.rows[which]);
        const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(row));
        const __m256i packed = _mm256_permutevar8x32_epi32(bits, order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys), packed);
        // The permutation is the list of lanes.
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions),
                            _mm256_add_epi32(order, _mm256_set1_epi32(int(base))));
        return size_t(__builtin_popcount(which));
    }

    Register larger(Register most) const { return _mm256_max_epi32(most, magnitude()); }
    static Key largest_lane(Register most) {
        alignas(32) Key key[lanes];
        _mm256_store_si256(reinterpret_cast<__m256i*>(key), most);
        Key largest = 0;
        for (Key each : key) largest = each > largest ? each : largest;
        return largest;
    }
    void keep_larger(Register& most, Register& place, Register here) const {
        const Mask more = _mm256_cmpgt_epi32(magnitude(), most);
        most = _mm256_blendv_epi8(most, magnitude(), more);
        place = _mm256_blendv_epi8(place, here, more);
    }
};

struct Vector16 : Avx2Words<uint16_t> {
    static Vector16 load(const uint16_t* x) {
        const auto* address = reinterpret_cast<const __m128i*>(x);
        return {{_mm256_cvtepu16_epi32(_mm_loadu_si128(address))}};
    }
};

struct Vector32 : Avx2Words<uint32_t> {
    using Float = float;

    static Vector32 load(const uint32_t* x) {
        return {{_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))}};
    }
    static Vector32 load_float(const float* x) {
        return {{_mm256_castps_si256(_mm256_loadu_ps(x))}};
    }
    static Vector32 add(Vector32 a, Vector32 b) {
        const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(a.bits), _mm256_castsi256_ps(b.bits));
        return {{_mm256_castps_si256(sum)}};
    }
    static Vector32 multiply(Vector32 a, float b) {
        const __m256 product = _mm256_mul_ps(_mm256_castsi256_ps(a.bits), _mm256_set1_ps(b));
        return {{_mm256_castps_si256(product)}};
    }
    void store(float* x) const { _mm256_storeu_ps(x, _mm256_castsi256_ps(bits)); }
    static uint64_t word(Mask mask) {
        return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
    }
    size_t compress(uint64_t which, float* x) const {
        Vector32{{_mm256_permutevar8x32_epi32(bits, order(kPermutations8.rows[which]))}}.store(x);
        return size_t(__builtin_popcountll(which));
    }
    static Vector32 expand(uint64_t which, const float* x) {
        const Register moved =
            _mm256_permutevar8x32_epi32(load_float(x).bits, order(kExpansions8.rows[which]));
        return {{_mm256_and_si256(moved, lanes_in(which))}};
    }
    Vector32 where(uint64_t which, Vector32 other) const {
        return {{_mm256_blendv_epi8(bits, other.bits, lanes_in(which))}};
    }
    static Register order(const uint8_t* row) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row)));
    }
    static Register lanes_in(uint64_t which) {
        const Register each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(which)), each), each);
    }
    void stream(float* x) const { _mm256_stream_ps(x, _mm256_castsi256_ps(bits)); }
    static void fence() { _mm_sfence(); }
};

struct Vector64 {
    using Storage = uint64_t;
    using Float = double;
    using Key = uint64_t;
    using Register = __m256i;
    using Mask = Register;
    static constexpr size_t lanes = 4;

    Register bits;

    static Register broadcast(Key key) { return _mm256_set1_epi64x(static_cast<long long>(key)); }
    static Register limit(Key threshold) { return broadcast(threshold - 1); }
    static Vector64 load(const uint64_t* x) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))};
    }
    static Vector64 load_float(const double* x) {
        return {_mm256_castpd_si256(_mm256_loadu_pd(x))};
    }
    Register magnitude() const {
        return _mm256_and_si256(bits, broadcast(Bits<Storage>::magnitude));
    }
    Mask reaching(Register limit) const { return _mm256_cmpgt_epi64(magnitude(), limit); }
    static bool any(Mask a, Mask b, Mask c, Mask d) { return Vector32::any(a, b, c, d); }

    size_t emit(Mask mask, uint32_t base, Key* keys, uint32_t* positions) const {
        const unsigned which = unsigned(_mm256_movemask_pd(_mm256_castsi256_pd(mask)));
        const auto* pairs = reinterpret_cast<const __m256i*>(kPermutations4.pairs[which]);
        const auto* words = reinterpret_cast<const __m128i*>(kPermutations4.words[which]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys),
                            _mm256_permutevar8x32_epi32(bits, _mm256_load_si256(pairs)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(positions),
                         _mm_add_epi32(_mm_load_si128(words), _mm_set1_epi32(int(base))));
        return size_t(__builtin_popcount(which));
    }

    static Vector64 add(Vector64 a, Vector64 b) {
        const __m256d sum = _mm256_add_pd(_mm256_castsi256_pd(a.bits), _mm256_castsi256_pd(b.bits));
        return {_mm256_castpd_si256(sum)};
    }
    static Vector64 multiply(Vector64 a, double b) {
        const __m256d product = _mm256_mul_pd(_mm256_castsi256_pd(a.bits), _mm256_set1_pd(b));
        return {_mm256_castpd_si256(product)};
    }
    void store(double* x) const { _mm256_storeu_pd(x, _mm256_castsi256_pd(bits)); }
    void stream(double* x) const { _mm256_stream_pd(x, _mm256_castsi256_pd(bits)); }
    static void fence() { _mm_sfence(); }
    Register larger(Register most) const {
        const Register m = magnitude();
        return _mm256_blendv_epi8(most, m, _mm256_cmpgt_epi64(m, most));
    }
    void keep_larger(Register& most, Register& place, Register here) const {
        const Mask more = _mm256_cmpgt_epi64(magnitude(), most);
        most = _mm256_blendv_epi8(most, magnitude(), more);
        place = _mm256_blendv_epi8(place, here, more);
    }
    static Key largest_lane(Register most) {
        alignas(32) Key key[lanes];
        _mm256_store_si256(reinterpret_cast<__m256i*>(key), most);
        Key largest = 0;
        for (Key each : key) largest = each > largest ? each : largest;
        return largest;
    }
};

}  // namespace
}  // namespace sparcel
