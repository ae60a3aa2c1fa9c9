// The pass that adds up what it selects from.
//
// Besides what the other passes use, a vector type of floats has `load_float`, `add`, `multiply`,
// `store`, `stream` and `fence`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/kernels.hpp"
#include "simd/passes.hpp"

namespace sparcel {
namespace {

template <class Vector>
struct FloatPasses : Passes<Vector> {
    using Float = typename Vector::Float;
    using typename Passes<Vector>::Key;
    using Passes<Vector>::lanes;
    using Passes<Vector>::group;

    static size_t accumulate(const Addition<Float>& addition, const Float* gradient, size_t n,
                             uint32_t base, Key threshold, Sink<Key> sink, Key* largest) {
        return addition.corrected()
                   ? run<true>(addition, gradient, n, base, threshold, sink, largest)
                   : run<false>(addition, gradient, n, base, threshold, sink, largest);
    }

  private:
    template <bool kCorrected>
    static size_t run(const Addition<Float>& addition, const Float* gradient, size_t n,
                      uint32_t base, Key threshold, Sink<Key> sink, Key* largest) {
        // Streaming stores need aligned addresses, so a partial step handles the first entries.
        const auto address = reinterpret_cast<uintptr_t>(addition.scratch);
        const size_t misaligned = address / sizeof(Float) % lanes;
        const size_t lead = misaligned ? lanes - misaligned : 0;
        const bool stream = addition.stream && address % sizeof(Float) == 0 && lead < n;
        return stream ? run<kCorrected, true>(addition, gradient, n, lead, base, threshold, sink,
                                              largest)
                      : run<kCorrected, false>(addition, gradient, n, 0, base, threshold, sink,
                                               largest);
    }

    template <bool kCorrected, bool kStream>
    static size_t run(const Addition<Float>& addition, const Float* gradient, size_t n, size_t lead,
                      uint32_t base, Key threshold, Sink<Key> sink, Key* largest) {
        const auto limit = Vector::limit(threshold);
        auto most = Vector::broadcast(*largest);
        size_t found = 0;
        size_t i = lead;
        if (lead) found += partial(addition, gradient, lead, base, limit, sink, found, most);
        for (; i + group <= n; i += group) {
            Vector v[4];
            for (size_t j = 0; j < 4; ++j) {
                const size_t at = i + j * lanes;
                const Vector added = addend<kCorrected>(addition, gradient + at, at);
                v[j] = Vector::add(Vector::load_float(addition.memory + at), added);
                kStream ? v[j].stream(addition.scratch + at) : v[j].store(addition.scratch + at);
                most = v[j].larger(most);
            }
            found += Passes<Vector>::emit_group(v, limit, base + uint32_t(i), sink, found);
        }
        for (; i < n; i += lanes) {
            const size_t rest = n - i < lanes ? n - i : lanes;
            found += partial(addition.from(i), gradient + i, rest, base + uint32_t(i), limit, sink,
                             found, most);
        }
        if (kStream) Vector::fence();
        *largest = Vector::largest_lane(most);
        return found;
    }

    template <bool kCorrected>
    static Vector addend(const Addition<Float>& addition, const Float* gradient, size_t at) {
        const Vector plain = Vector::load_float(gradient);
        if (!kCorrected) return plain;
        Vector sum = Vector::multiply(plain, addition.scale);
        if (addition.velocity) {
            const Vector velocity = Vector::load_float(addition.velocity + at);
            sum = Vector::add(sum, Vector::multiply(velocity, addition.momentum));
        }
        if (addition.entering) sum.store(addition.entering + at);
        return sum;
    }

    template <class Limit>
    static size_t partial(const Addition<Float>& addition, const Float* gradient, size_t n,
                          uint32_t base, Limit limit, Sink<Key> sink, size_t found, Limit& most) {
        Float sum[lanes] = {};
        for (size_t i = 0; i < n; ++i) {
            Float added = gradient[i] * addition.scale;
            if (addition.velocity) added += addition.velocity[i] * addition.momentum;
            if (addition.entering) addition.entering[i] = added;
            addition.scratch[i] = sum[i] = addition.memory[i] + added;
        }
        const Vector v = Vector::load_float(sum);
        most = v.larger(most);
        return Passes<Vector>::emit_one(v, limit, base, sink, found);
    }
};

}  // namespace
}  // namespace sparcel
