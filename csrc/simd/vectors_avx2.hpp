// Vector types of AVX2. It has no compress instruction, so a table of permutations replaces it.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "simd/vectors.hpp"

namespace sparcel {
namespace {

// Row `mask` of `front` moves the masked lanes of 8 to the front; `back` moves them back.
struct Permutations8 {
    alignas(64) uint8_t front[256][8] = {};
    alignas(64) uint8_t back[256][8] = {};

    constexpr Permutations8() {
        for (int mask = 0; mask < 256; ++mask) {
            int place = 0;
            for (int lane = 0; lane < 8; ++lane) {
                back[mask][lane] = uint8_t(place);
                if (mask >> lane & 1) front[mask][place++] = uint8_t(lane);
            }
        }
    }
};

// To the front for 4 lanes of 64 bits, as pairs of 32-bit lanes, and for 4 lanes of 32 bits.
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

constexpr Permutations8 kPermutations8;
constexpr Permutations4 kPermutations4;

template <class Self, class Storage>
struct Avx2Vector : VectorLanes<Self, Storage, 32> {
    using Base = VectorLanes<Self, Storage, 32>;
    using typename Base::Float;
    using typename Base::Mask;

    static bool any(Mask a, Mask b, Mask c, Mask d) {
        const __m256i all = __m256i(a) | __m256i(b) | __m256i(c) | __m256i(d);
        return !_mm256_testz_si256(all, all);
    }
    void stream(Float* x) const {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(x), __m256i(this->bits));
    }
    static void fence() { _mm_sfence(); }
};

template <class Self, class Storage>
struct Avx2Words : Avx2Vector<Self, Storage> {
    using typename Avx2Vector<Self, Storage>::Mask;

    static uint64_t word(Mask mask) { return unsigned(_mm256_movemask_ps(__m256(mask))); }
    size_t emit(Mask mask, uint32_t base, uint32_t* keys, uint32_t* positions) const {
        const unsigned which = unsigned(word(mask));
        const __m256i order = row(kPermutations8.front[which]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys), ordered(order));
        // The permutation is the list of lanes.
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions),
                            _mm256_add_epi32(order, _mm256_set1_epi32(int(base))));
        return size_t(__builtin_popcount(which));
    }

  protected:
    static __m256i row(const uint8_t* row) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row)));
    }
    __m256i ordered(__m256i order) const {
        return _mm256_permutevar8x32_epi32(__m256i(this->bits), order);
    }
};

struct Vector16 : Avx2Words<Vector16, uint16_t> {
    static Vector16 load(const uint16_t* x) {
        const auto* address = reinterpret_cast<const __m128i*>(x);
        return {{{{Register(_mm256_cvtepu16_epi32(_mm_loadu_si128(address)))}}}};
    }
};

struct Vector32 : Avx2Words<Vector32, uint32_t> {
    size_t compress(uint64_t which, float* x) const {
        of(ordered(row(kPermutations8.front[which]))).store(x);
        return size_t(__builtin_popcountll(which));
    }
    static Vector32 expand(uint64_t which, const float* x) {
        const __m256i moved = load_float(x).ordered(row(kPermutations8.back[which]));
        return of(_mm256_and_si256(moved, lanes_in(which)));
    }
    Vector32 where(uint64_t which, Vector32 other) const {
        return of(_mm256_blendv_epi8(__m256i(bits), __m256i(other.bits), lanes_in(which)));
    }

  private:
    static Vector32 of(__m256i words) { return {{{{Register(words)}}}}; }
    static __m256i lanes_in(uint64_t which) {
        const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(which)), each), each);
    }
};

struct Vector64 : Avx2Vector<Vector64, uint64_t> {
    size_t emit(Mask mask, uint32_t base, uint64_t* keys, uint32_t* positions) const {
        const unsigned which = unsigned(_mm256_movemask_pd(__m256d(mask)));
        const auto* pairs = reinterpret_cast<const __m256i*>(kPermutations4.pairs[which]);
        const auto* words = reinterpret_cast<const __m128i*>(kPermutations4.words[which]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys),
                            _mm256_permutevar8x32_epi32(__m256i(bits), _mm256_load_si256(pairs)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(positions),
                         _mm_add_epi32(_mm_load_si128(words), _mm_set1_epi32(int(base))));
        return size_t(__builtin_popcount(which));
    }
};

}  // namespace
}  // namespace sparcel
