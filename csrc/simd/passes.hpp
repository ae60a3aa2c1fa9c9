// The passes, written once over the vector types that each instruction set provides.
//
// A vector type has `lanes`, `load`, `reaching` (a mask of lanes), `any`, `emit` (append the masked
// lanes to a sink), and for floats `add`, `store`, `stream`, `larger`.
#pragma once

#include "kernels.hpp"

namespace sparcel {
namespace {

// The tail that fills no register goes through one that is padded with zeros: they never survive.
template <class Vector, class Storage>
Vector load_partial(const Storage* x, size_t n) {
    Storage padded[Vector::lanes] = {};
    for (size_t i = 0; i < n; ++i) padded[i] = x[i];
    return Vector::load(padded);
}

template <class Vector>
struct Passes {
    using Storage = typename Vector::Storage;
    using Key = typename Vector::Key;
    static constexpr size_t lanes = Vector::lanes;
    static constexpr size_t group = 4 * lanes;

    static size_t compact(const Storage* x, size_t n, uint32_t base, Key threshold,
                          Sink<Key> sink) {
        const auto limit = Vector::limit(threshold);
        size_t found = 0;
        size_t i = 0;
        for (; i + group <= n; i += group) {
            const Vector v[4] = {Vector::load(x + i), Vector::load(x + i + lanes),
                                 Vector::load(x + i + 2 * lanes), Vector::load(x + i + 3 * lanes)};
            found += emit_group(v, limit, base + uint32_t(i), sink, found);
        }
        for (; i + lanes <= n; i += lanes) {
            found += emit_one(Vector::load(x + i), limit, base + uint32_t(i), sink, found);
        }
        if (i < n) {
            const Vector v = load_partial<Vector>(x + i, n - i);
            found += emit_one(v, limit, base + uint32_t(i), sink, found);
        }
        return found;
    }

    template <class Limit>
    static size_t emit_group(const Vector (&v)[4], Limit limit, uint32_t base, Sink<Key> sink,
                             size_t found) {
        const typename Vector::Mask m[4] = {v[0].reaching(limit), v[1].reaching(limit),
                                            v[2].reaching(limit), v[3].reaching(limit)};
        if (!Vector::any(m[0], m[1], m[2], m[3])) [[likely]] {
            return 0;
        }
        const size_t before = found;
        for (int j = 0; j < 4; ++j) {
            found += v[j].emit(m[j], base + uint32_t(j * lanes), sink.keys + found,
                               sink.positions + found);
        }
        return found - before;
    }

    template <class Limit>
    static size_t emit_one(Vector v, Limit limit, uint32_t base, Sink<Key> sink, size_t found) {
        return v.emit(v.reaching(limit), base, sink.keys + found, sink.positions + found);
    }
};

template <class Vector>
struct FloatPasses : Passes<Vector> {
    using Float = typename Vector::Float;
    using typename Passes<Vector>::Key;
    using Passes<Vector>::lanes;
    using Passes<Vector>::group;

    static size_t accumulate(const Float* memory, const Float* gradient, Float* scratch, size_t n,
                             uint32_t base, Key threshold, Sink<Key> sink, Key* largest,
                             bool stream) {
        // Streaming stores need aligned addresses: a partial step leads up to the first one.
        const size_t misaligned = reinterpret_cast<uintptr_t>(scratch) / sizeof(Float) % lanes;
        stream = stream && reinterpret_cast<uintptr_t>(scratch) % sizeof(Float) == 0;
        const size_t lead = stream && misaligned ? lanes - misaligned : 0;
        if (lead >= n) stream = false;
        return stream
                   ? run<true>(memory, gradient, scratch, n, lead, base, threshold, sink, largest)
                   : run<false>(memory, gradient, scratch, n, 0, base, threshold, sink, largest);
    }

  private:
    template <bool kStream>
    static size_t run(const Float* memory, const Float* gradient, Float* scratch, size_t n,
                      size_t lead, uint32_t base, Key threshold, Sink<Key> sink, Key* largest) {
        const auto limit = Vector::limit(threshold);
        auto most = Vector::broadcast(*largest);
        size_t found = 0;
        size_t i = lead;
        if (lead) {
            found += partial(memory, gradient, scratch, lead, base, limit, sink, found, most);
        }
        for (; i + group <= n; i += group) {
            Vector v[4];
            for (size_t j = 0; j < 4; ++j) {
                const size_t at = i + j * lanes;
                v[j] =
                    Vector::add(Vector::load_float(memory + at), Vector::load_float(gradient + at));
                kStream ? v[j].stream(scratch + at) : v[j].store(scratch + at);
                most = v[j].larger(most);
            }
            found += Passes<Vector>::emit_group(v, limit, base + uint32_t(i), sink, found);
        }
        for (; i < n; i += lanes) {
            const size_t rest = n - i < lanes ? n - i : lanes;
            found += partial(memory + i, gradient + i, scratch + i, rest, base + uint32_t(i), limit,
                             sink, found, most);
        }
        if (kStream) Vector::fence();
        *largest = Vector::largest_lane(most);
        return found;
    }

    template <class Limit>
    static size_t partial(const Float* memory, const Float* gradient, Float* scratch, size_t n,
                          uint32_t base, Limit limit, Sink<Key> sink, size_t found, Limit& most) {
        Float sum[lanes] = {};
        for (size_t i = 0; i < n; ++i) scratch[i] = sum[i] = memory[i] + gradient[i];
        const Vector v = Vector::load_float(sum);
        most = v.larger(most);
        return Passes<Vector>::emit_one(v, limit, base, sink, found);
    }
};

}  // namespace
}  // namespace sparcel
