// Passes over a vector of which a bitmap selects coordinates, and over the selected values alone.
//
// Besides what the other passes use, a vector type has `word` (a mask as bits) and `compress` (the
// selected lanes, to the front); one of at least 8 lanes has `expand` (the first lanes, to the
// selected ones, zeros elsewhere) and `where` (another vector's lanes where they are selected).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/bits.hpp"
#include "simd/kernels.hpp"
#include "simd/narrow_pass.hpp"

namespace sparcel {
namespace {

template <class Vector>
struct MaskedPasses {
    using Register = typename Vector::Register;
    static constexpr size_t lanes = Vector::lanes;
    static constexpr uint64_t first_lanes = (uint64_t{1} << lanes) - 1;

    static size_t select(const float* memory, const float* addend, float* x, size_t words,
                         uint32_t threshold, uint64_t* mask, float* values, uint32_t* largest) {
        return memory
                   ? select_from<true>(memory, addend, x, words, threshold, mask, values, largest)
                   : select_from<false>(memory, addend, x, words, threshold, mask, values, largest);
    }

    static void put(const uint64_t* mask, size_t words, const float* values, float* x) {
        if constexpr (kOneByOne) {
            each_selected(mask, words, [&](size_t i) { x[i] = *values++; });
        } else {
            each_register(mask, words, [&](uint64_t which, size_t at) {
                const Vector old = Vector::load_float(x + at);
                old.where(which, Vector::expand(which, values)).store(x + at);
                values += __builtin_popcountll(which);
            });
        }
    }

    static void add(const uint64_t* mask, size_t words, const float* values, float* x) {
        if constexpr (kOneByOne) {
            each_selected(mask, words, [&](size_t i) { x[i] += *values++; });
        } else {
            each_register(mask, words, [&](uint64_t which, size_t at) {
                const Vector old = Vector::load_float(x + at);
                const Vector sum = Vector::add(old, Vector::expand(which, values));
                old.where(which, sum).store(x + at);
                values += __builtin_popcountll(which);
            });
        }
    }

    static void expand(const uint64_t* mask, size_t words, const float* values, float* x) {
        if constexpr (kOneByOne) {
            std::memset(x, 0, words * 64 * sizeof *x);
            put(mask, words, values, x);
        } else {
            each_register(mask, words, [&](uint64_t which, size_t at) {
                Vector::expand(which, values).store(x + at);
                values += __builtin_popcountll(which);
            });
        }
    }

    static uint32_t divide(float* x, size_t n, float divisor) {
        uint32_t largest = 0;
        for (size_t i = 0; i < n; ++i) {
            x[i] /= divisor;
            const uint32_t magnitude = bits_of(x[i]) & Bits<uint32_t>::magnitude;
            largest = magnitude > largest ? magnitude : largest;
        }
        return largest;
    }

    static double magnitude(const float* x, size_t n) {
        constexpr size_t kSums = 64;
        float sums[kSums] = {};
        size_t i = 0;
        for (; i + kSums <= n; i += kSums) {
            for (size_t j = 0; j < kSums; ++j) sums[j] += __builtin_fabsf(x[i + j]);
        }
        double total = 0;
        for (; i < n; ++i) total += double(__builtin_fabsf(x[i]));
        for (const float sum : sums) total += double(sum);
        return total;
    }

    static void move_out(const float* x, size_t n, float* to) {
        constexpr size_t bytes = lanes * sizeof(float);
        size_t i = 0;
        if (reinterpret_cast<uintptr_t>(to) % bytes == 0) {
            for (; i + lanes <= n; i += lanes) Vector::load_float(x + i).stream(to + i);
        }
        for (; i < n; ++i) to[i] = x[i];
    }

  private:
    template <bool kAdds>
    static size_t select_from(const float* memory, const float* addend, float* x, size_t words,
                              uint32_t threshold, uint64_t* mask, float* values,
                              uint32_t* largest) {
        const auto limit = Vector::limit(threshold);
        auto most = Vector::broadcast(*largest);
        float* next = values;
        for (size_t word = 0; word < words; ++word) {
            uint64_t bits = 0;
            for (size_t lane = 0; lane < 64; lane += lanes) {
                const size_t at = 64 * word + lane;
                Vector v;
                if constexpr (kAdds) {
                    v = Vector::add(Vector::load_float(memory + at),
                                    Vector::load_float(addend + at));
                    v.store(x + at);
                } else {
                    v = Vector::load_float(x + at);
                }
                most = v.larger(most);
                const uint64_t which = Vector::word(v.reaching(limit));
                bits |= which << lane;
                next += v.compress(which, next);
            }
            mask[word] = bits;
        }
        *largest = Vector::largest_lane(most);
        return size_t(next - values);
    }

    // Without an instruction that moves several values to selected lanes.
    static constexpr bool kOneByOne = lanes < 8;

    template <class Run>
    static void each_selected(const uint64_t* mask, size_t words, const Run& run) {
        for (size_t word = 0; word < words; ++word) {
            for (uint64_t bits = mask[word]; bits; bits &= bits - 1) {
                run(64 * word + size_t(__builtin_ctzll(bits)));
            }
        }
    }

    template <class Run>
    static void each_register(const uint64_t* mask, size_t words, const Run& run) {
        for (size_t word = 0; word < words; ++word) {
            for (size_t lane = 0; lane < 64; lane += lanes) {
                run(mask[word] >> lane & first_lanes, 64 * word + lane);
            }
        }
    }
};

template <class Vector>
constexpr MaskPasses masked_passes = {
    MaskedPasses<Vector>::select,   MaskedPasses<Vector>::put,
    MaskedPasses<Vector>::add,      MaskedPasses<Vector>::expand,
    MaskedPasses<Vector>::divide,   MaskedPasses<Vector>::magnitude,
    MaskedPasses<Vector>::move_out, Vector::fence,
};

}  // namespace
}  // namespace sparcel
