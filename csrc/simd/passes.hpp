// The passes, written once over the vector types that each instruction set provides.
//
// A vector type has `lanes`, `load`, `reaching` (a mask of lanes), `any`, `emit` (append the masked
// lanes to a sink), `larger` and `keep_larger` (running maxima of each lane), and for floats `add`,
// `store`, `stream`; optionally `load_first`, which reads less than a whole register.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "bits.hpp"
#include "kernels.hpp"

namespace sparcel {
namespace {

// A tail shorter than a register is padded with zeros, which never survive.
template <class Vector, class Storage>
Vector load_partial(const Storage* x, size_t n) {
    if constexpr (requires { Vector::load_first(x, n); }) {
        return Vector::load_first(x, n);
    } else {
        Storage padded[Vector::lanes] = {};
        std::memcpy(padded, x, n * sizeof(Storage));
        return Vector::load(padded);
    }
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

    // Every lane keeps the position of its largest, so that no branch depends on the data.
    static size_t first_largest(const Storage* x, size_t n) {
        auto most = Vector::broadcast(0), place = Vector::broadcast(0);
        each_vector(x, n, [&](Vector v, size_t i) {
            v.keep_larger(most, place, Vector::broadcast(Key(i)));
        });
        Key magnitudes[lanes], places[lanes];
        std::memcpy(magnitudes, &most, sizeof most);
        std::memcpy(places, &place, sizeof place);
        const Key largest = Vector::largest_lane(most);
        Key first = ~Key{0};
        for (size_t lane = 0; lane < lanes; ++lane) {
            const Key smaller = Key{0} - Key(magnitudes[lane] != largest);  // all ones, or 0
            const Key at = (places[lane] + Key(lane)) | smaller;
            first = at < first ? at : first;
        }
        return first;
    }

    // Entry i belongs to group i % kGroups. At least k entries reach the k-th largest of the
    // groups' maxima, and few more do unless they tie or are concentrated in few groups.
    static size_t few_largest(const Storage* x, size_t n, size_t k, Sink<Key> sink, Key* floor) {
        Key most[kGroups], ranks[kGroups];
        maxima(x, n, most);
        rank(most, ranks);
        Key kth = 0;
        for (size_t i = 0; i < kGroups; ++i) kth |= most[i] & (Key{0} - Key(ranks[i] == k - 1));
        *floor = kth > 0 ? kth : 1;
        const size_t found = compact(x, n, 0, *floor, sink);
        return found > kGroups ? found : keep_largest(found, k, sink);
    }

    static void maxima(const Storage* x, size_t n, Key (&most)[kGroups]) {
        typename Vector::Register largest[kGroups / lanes];
        for (auto& each : largest) each = Vector::broadcast(0);
        size_t i = 0;
        for (; i + kGroups <= n; i += kGroups) {
            for (size_t j = 0; j < kGroups / lanes; ++j) {
                largest[j] = Vector::load(x + i + j * lanes).larger(largest[j]);
            }
        }
        for (size_t j = 0; i < n; ++j, i += lanes) {
            const bool whole = i + lanes <= n;
            const Vector v = whole ? Vector::load(x + i) : load_partial<Vector>(x + i, n - i);
            largest[j] = v.larger(largest[j]);
        }
        std::memcpy(most, largest, sizeof most);
    }

    // Counts the entries that come before each: larger ones, and earlier ones that tie.
    static void rank(const Key (&magnitudes)[kGroups], Key (&ranks)[kGroups]) {
        using Signed = std::make_signed_t<Key>;
        using Lanes [[gnu::vector_size(lanes * sizeof(Key))]] = Signed;
        for (size_t first = 0; first < kGroups; first += lanes) {
            Lanes own, place, before = {};
            std::memcpy(&own, magnitudes + first, sizeof own);
            for (size_t lane = 0; lane < lanes; ++lane) place[lane] = Signed(first + lane);
            for (size_t other = 0; other < kGroups; ++other) {
                // A true lane is -1, so an earlier entry that ties counts as larger.
                const Lanes earlier = place > Lanes{} + Signed(other);
                before -= Lanes{} + Signed(magnitudes[other]) > own + earlier;
            }
            std::memcpy(ranks + first, &before, sizeof before);
        }
    }

    // Cuts the `found` <= kGroups entries of the sink down to the k largest.
    static size_t keep_largest(size_t found, size_t k, Sink<Key> sink) {
        Key magnitudes[kGroups], ranks[kGroups];
        for (size_t i = 0; i < kGroups; ++i) {
            magnitudes[i] = sink.keys[i] & (i < found ? Bits<Storage>::magnitude : 0);
        }
        rank(magnitudes, ranks);
        size_t kept = 0;
        for (size_t i = 0; i < found; ++i) {
            sink.keys[kept] = sink.keys[i];
            sink.positions[kept] = sink.positions[i];
            kept += ranks[i] < k;
        }
        return kept;
    }

    static constexpr Readers<Storage> readers = {compact, first_largest, few_largest};

    template <class Visit>
    static void each_vector(const Storage* x, size_t n, const Visit& visit) {
        size_t i = 0;
        for (; i + lanes <= n; i += lanes) visit(Vector::load(x + i), i);
        if (i < n) visit(load_partial<Vector>(x + i, n - i), i);
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
        // Streaming stores need aligned addresses, so a partial step handles the first entries.
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
