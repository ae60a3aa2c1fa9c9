// The passes, written once over the vector types that each instruction set provides.
//
// A vector type has `lanes`, `load`, `reaching` (a mask of lanes), `any`, `emit` (append the masked
// lanes to a sink), `larger` and `keep_larger` (running maxima of each lane); optionally
// `load_first`, which reads less than a whole register.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd/bits.hpp"
#include "simd/kernels.hpp"

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
    static constexpr size_t span = 2 * kGroups;  // entries that share maxima

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
    // groups' maxima, and few more do unless they are concentrated in few groups.
    static size_t few_largest(const Storage* x, size_t n, size_t k, Sink<Key> sink, Key* floor) {
        Key* maxima = sink.keys + n + kSlack;  // behind all that may survive
        Key most[kGroups];
        find_maxima(x, n, maxima, most);
        *floor = kth_of_groups(most, k);
        const size_t found = compact_spans(x, n, k, maxima, *floor, sink);
        return found <= k || found > kGroups ? found : keep_largest(found, k, sink);
    }

    // Finds the largest magnitude of each group, in all of x and in each whole span.
    static void find_maxima(const Storage* x, size_t n, Key* of_spans, Key (&of_all)[kGroups]) {
        typename Vector::Register most[kGroups / lanes];
        for (auto& each : most) each = Vector::broadcast(0);
        size_t i = 0;
        for (; i + span <= n; i += span, of_spans += kGroups) {
            for (size_t j = 0; j < kGroups / lanes; ++j) {
                const Storage* at = x + i + j * lanes;
                auto largest = Vector::load(at).magnitude();
                for (size_t next = kGroups; next < span; next += kGroups) {
                    largest = Vector::load(at + next).larger(largest);
                }
                std::memcpy(of_spans + j * lanes, &largest, sizeof largest);
                most[j] = Vector{largest}.larger(most[j]);
            }
        }
        for (size_t j = 0; i < n; j = (j + 1) % (kGroups / lanes), i += lanes) {
            const bool whole = i + lanes <= n;
            const Vector v = whole ? Vector::load(x + i) : load_partial<Vector>(x + i, n - i);
            most[j] = v.larger(most[j]);
        }
        std::memcpy(of_all, most, sizeof most);
    }

    // Returns the k-th largest, at least 1: the smallest that fewer than k exceed.
    static Key kth_of_groups(const Key (&magnitudes)[kGroups], size_t k) {
        using Signed = std::make_signed_t<Key>;
        using Lanes [[gnu::vector_size(lanes * sizeof(Key))]] = Signed;
        Lanes least = Lanes{} + Signed(Bits<Storage>::magnitude);  // of those that few exceed
        for (size_t first = 0; first < kGroups; first += lanes) {
            Lanes own, above = {};
            std::memcpy(&own, magnitudes + first, sizeof own);
            for (size_t other = 0; other < kGroups; ++other) {
                above -= Lanes{} + Signed(magnitudes[other]) > own;  // a true lane is -1
            }
            own = above < Signed(k) ? own : least;
            least = own < least ? own : least;
        }
        Key kth = Key(least[0]);
        for (size_t lane = 1; lane < lanes; ++lane) {
            kth = Key(least[lane]) < kth ? Key(least[lane]) : kth;
        }
        return kth > 0 ? kth : 1;
    }

    // Like compact, but reads only spans whose maxima reach `floor`. After k entries it takes only
    // those that exceed it, because a later tie is never among the k largest.
    static size_t compact_spans(const Storage* x, size_t n, size_t k, const Key* maxima, Key floor,
                                Sink<Key> sink) {
        auto limit = Vector::limit(floor);
        size_t found = 0;
        size_t i = 0;
        for (; i + span <= n; i += span, maxima += kGroups) {
            if (!any_reaches(maxima, limit)) continue;
            for (size_t at = i; at < i + span; at += lanes) {
                found += emit_one(Vector::load(x + at), limit, uint32_t(at), sink, found);
            }
            if (found >= k) limit = Vector::limit(floor + 1);
        }
        const Sink<Key> tail{sink.keys + found, sink.positions + found};
        return found + compact(x + i, n - i, uint32_t(i), floor + (found >= k), tail);
    }

    template <class Limit>
    static bool any_reaches(const Key* magnitudes, Limit limit) {
        typename Vector::Mask reached = {};
        for (size_t j = 0; j < kGroups; j += lanes) {
            Vector v;
            std::memcpy(&v.bits, magnitudes + j, sizeof v.bits);
            reached |= v.reaching(limit);
        }
        return Vector::any(reached, reached, reached, reached);
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

}  // namespace
}  // namespace sparcel
