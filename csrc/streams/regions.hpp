// The passes over vectors that ranks divide among themselves in regions: what each rank sends of
// every region to its owner, what the owner makes of that and returns, and what all ranks make of
// what was returned.
//
// Messages are those of `sparcel.formats`, in few bits, packed or dense. A piece is taken from
// memory and gradient to a message's codes, or back, while it is in the first-level cache.
// `sparcel.core.kernels.definitions.regions` says what they mean.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "base/numbers.hpp"
#include "base/parallel.hpp"
#include "simd/kernels.hpp"
#include "streams/region_layout.hpp"
#include "streams/region_limits.hpp"
#include "streams/region_reader.hpp"
#include "streams/region_writer.hpp"

namespace sparcel {

// What enters memory: scale·gradient.
template <class Gradient>
struct Entering {
    const float* memory;
    const Gradient* gradient;
    float scale;

    float addend(size_t i) const {
        const float plain = widen(gradient[i]);
        return scale == 1 ? plain : plain * scale;
    }
    float sum(size_t i) const { return memory[i] + addend(i); }

    // Returns the addends of [begin, begin + n), which `room` holds where they must be computed.
    const float* addends(size_t begin, size_t n, float* room) const {
        if constexpr (std::is_same_v<Gradient, float>) {
            if (scale == 1) return gradient + begin;
        }
        for (size_t i = 0; i < n; ++i) room[i] = addend(begin + i);
        return room;
    }
};

// Computes x = memory + what enters, and takes out of it what this rank sends of the other regions:
// a message by rank, empty for its own. `most` bounds their entries; `headers` begin them.
template <class Gradient>
std::vector<Written> take_others(const Regions& regions, size_t rank,
                                 const Entering<Gradient>& source, const Selection& selection,
                                 std::span<const size_t> most, std::span<const Header> headers,
                                 float* x, int threads) {
    const std::vector<Limit> limits =
        limits_of(selection, Domain(regions, rank, true), [&](size_t i) { return source.sum(i); });
    const auto addends = [&](size_t begin, size_t n, const auto& run) {
        alignas(64) float room[kMostPiece];
        run(source.memory + begin, source.addends(begin, n, room), x + begin);
    };
    const auto take = [&](size_t owner) {
        Selected selected(selection.coding, regions.length(owner), most[owner], selection.dense);
        const auto piece = [&](size_t begin, size_t n, size_t place) {
            addends(begin, n, [&](const float* memory, const float* addend, float* sums) {
                selected.take(memory, addend, sums, n, begin, place, limits);
            });
        };
        regions.each_piece(owner, 0, regions.blocks(owner), piece);
        return selected.finish(headers[owner]);
    };
    const auto add = [&](size_t begin, size_t n, size_t) {
        addends(begin, n, [&](const float* memory, const float* addend, float* sums) {
            for (size_t i = 0; i < n; ++i) sums[i] = memory[i] + addend[i];
        });
    };
    std::vector<Written> written(regions.ranks);
    const size_t tasks = std::min(useful_threads(regions.size, threads), regions.ranks);
    parallel(tasks, [&](size_t task) {
        const size_t last = split_point(regions.ranks, task + 1, tasks);
        for (size_t owner = split_point(regions.ranks, task, tasks); owner < last; ++owner) {
            if (owner == rank) {
                regions.each_piece(owner, 0, regions.blocks(owner), add);
            } else {
                written[owner] = take(owner);
            }
        }
    });
    return written;
}

// Takes out of the own region of x what this rank returns, at most `most` entries.
inline Written take_own(const Regions& regions, size_t rank, const Selection& selection,
                        size_t most, const Header& header, float* x) {
    const std::vector<Limit> limits =
        limits_of(selection, Domain(regions, rank, false), [&](size_t i) { return x[i]; });
    Selected selected(selection.coding, regions.length(rank), most, selection.dense);
    regions.each_piece(rank, 0, regions.blocks(rank), [&](size_t begin, size_t n, size_t place) {
        selected.take(nullptr, nullptr, x + begin, n, begin, place, limits);
    });
    return selected.finish(header);
}

// Adds messages to the region `rank` of x, in order, and returns by how much its magnitude rose.
inline double add_packed(const Regions& regions, size_t rank, std::span<const Packed> messages,
                         const Coding& coding, float* x, int threads) {
    const Kernels& passes = kernels();
    const size_t blocks = regions.blocks(rank);
    const size_t useful = useful_threads(regions.length(rank) * (messages.size() + 1), threads);
    const size_t tasks = std::clamp<size_t>(blocks, 1, useful);
    std::vector<double> magnitudes(tasks);
    parallel(tasks, [&](size_t task) {
        const size_t from = split_point(blocks, task, tasks);
        std::vector<Values> values;
        values.reserve(messages.size());
        for (const Packed& message : messages) {
            values.emplace_back(message, coding, from * regions.block / 64);
        }
        const size_t to = split_point(blocks, task + 1, tasks);
        regions.each_piece(rank, from, to, [&](size_t begin, size_t n, size_t place) {
            alignas(64) float padded[kMostPiece];
            float* const sums = n % 64 ? padded : x + begin;
            if (n % 64) std::copy_n(x + begin, n, padded);
            const double before = passes.masked.magnitude(sums, n);
            for (size_t i = 0; i < messages.size(); ++i) {
                const auto add = [&](const float* added, const uint64_t* mask, size_t) {
                    if (mask) return passes.masked.add(mask, (n + 63) / 64, added, sums);
                    for (size_t j = 0; j < n; ++j) sums[j] += added[j];
                };
                with_piece(messages[i], values[i], n, place, add);
            }
            magnitudes[task] += passes.masked.magnitude(sums, n) - before;
            if (n % 64) std::copy_n(padded, n, x + begin);
        });
    });
    double total = 0;
    for (const double one : magnitudes) total += one;
    return total;
}

// The bits of the least magnitude that becomes infinite in a dtype.
template <class T>
constexpr uint32_t kOverflows = kNonFiniteBits;
template <>
constexpr uint32_t kOverflows<Half> = 0x477ff000;
template <>
constexpr uint32_t kOverflows<Brain> = 0x7f7f8000;

// Writes a region's values over a divisor to `out`, zeros elsewhere; tells whether all are finite.
template <class Out>
bool write_packed(const Regions& regions, size_t rank, const Packed& message, const Coding& coding,
                  float divisor, Out* out) {
    const Kernels& passes = kernels();
    Values values(message, coding);
    uint32_t largest = 0;
    regions.each_piece(rank, 0, regions.blocks(rank), [&](size_t begin, size_t n, size_t place) {
        alignas(64) float piece[kMostPiece + kSlack];
        if (message.count == 0) std::fill_n(piece, n, 0.0f);
        const auto write = [&](const float* found, const uint64_t* mask, size_t count) {
            alignas(64) float quotients[kMostPiece + kSlack];
            float* const divided = mask ? quotients : piece;
            std::copy_n(found, count, divided);
            largest = std::max(largest, passes.masked.divide(divided, count, divisor));
            if (mask) passes.masked.expand(mask, (n + 63) / 64, quotients, piece);
        };
        with_piece(message, values, n, place, write);
        if constexpr (std::is_same_v<Out, float>) {
            passes.masked.move_out(piece, n, out + begin);
        } else {
            for (size_t i = 0; i < n; ++i) out[begin + i] = narrow<Out>(piece[i]);
        }
    });
    passes.masked.fence();
    return message.finite && largest < kOverflows<Out>;
}

// Writes all regions of a vector; tells whether all are finite.
template <class Out>
bool write_all(const Regions& regions, std::span<const Packed> messages, const Coding& coding,
               float divisor, int threads, Out* out) {
    std::vector<uint8_t> finite(regions.ranks);
    const size_t tasks = std::min(useful_threads(regions.size, threads), regions.ranks);
    parallel(tasks, [&](size_t task) {
        const size_t last = split_point(regions.ranks, task + 1, tasks);
        for (size_t rank = split_point(regions.ranks, task, tasks); rank < last; ++rank) {
            finite[rank] = write_packed(regions, rank, messages[rank], coding, divisor, out);
        }
    });
    return std::ranges::all_of(finite, [](uint8_t one) { return one != 0; });
}

}  // namespace sparcel
