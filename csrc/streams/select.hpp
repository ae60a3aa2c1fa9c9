// Exact selection: guess a threshold from a sample, compact the entries that reach it in one pass,
// and select exactly among these survivors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer.hpp"
#include "base/parallel.hpp"
#include "simd/bits.hpp"
#include "streams/kth.hpp"
#include "streams/sources.hpp"
#include "streams/survivors.hpp"

namespace sparcel {

template <class Index, class Storage>
struct Selection {
    Buffer<Index> indices;
    Buffer<Storage> values;
    size_t count = 0;

    explicit Selection(size_t capacity) : indices(capacity), values(capacity) {}
};

namespace detail {

constexpr size_t kSamples = 32768;
constexpr size_t kRun = 4;  // neighbours that are sampled together, from one cache line or two
constexpr size_t kWorthSampling = 2048;
constexpr size_t kLongestPart = size_t{1} << 31;  // the range of 32-bit positions

// A fixed pseudo-random sequence, so that no period in the data can mislead the sample.
inline uint64_t scramble(uint64_t x) {
    x = (x + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9;
    return (x ^ (x >> 31)) * 0x94D049BB133111EB >> 32;
}

template <class Key>
struct Guess {
    Key threshold;
    size_t expected;  // how many will reach it
};

// Estimates, from a sample, a magnitude that slightly more than k of [begin, end) reach. If nearly
// all are wanted, returns one that all but zeros reach. `caution` multiplies the excess over k.
template <class Source>
auto guess_threshold(const Source& source, size_t begin, size_t end, size_t k, double caution)
    -> Guess<typename Source::Key> {
    using Key = typename Source::Key;
    const size_t n = end - begin;
    const Guess<Key> all{1, std::min(n, 2 * k)};
    if (n < kWorthSampling || k >= n / 2) return all;
    const size_t runs = std::min(kSamples, n / 8) / kRun;
    const size_t stratum = n / runs;
    Buffer<Key> sample(runs * kRun), spare;
    for (size_t run = 0; run < runs; ++run) {
        const size_t at = begin + run * stratum + scramble(run) % (stratum - kRun + 1);
        for (size_t i = 0; i < kRun; ++i) sample[run * kRun + i] = source.at(at + i);
    }
    const double expected = double(k) / double(n) * double(runs * kRun);
    const double rank = expected + caution * (3 * std::sqrt(expected) + 4);
    if (rank >= double(runs * kRun)) return all;
    const Key mask = Bits<typename Source::Word>::magnitude;
    const Key kth = kth_magnitude(sample.data(), runs * kRun, size_t(rank), mask, spare);
    return {std::max<Key>(kth, 1), size_t(rank / double(runs * kRun) * double(n))};
}

template <class Source, class Storage>
void scan(const Source& source, size_t end, size_t k, Survivors<Storage>& survivors) {
    for (size_t i = survivors.begin; i < end; i += kBlock) {
        survivors.make_room(k);
        source.pass(i, std::min(kBlock, end - i), survivors);
    }
}

template <class Storage>
using Parts = std::vector<Survivors<Storage>>;

template <class Storage>
Parts<Storage> make_parts(size_t n, int threads) {
    return Parts<Storage>(std::max(useful_threads(n, threads), n / kLongestPart + 1));
}

// Scans all parts with one threshold and returns how many entries survived.
template <class Source, class Storage>
size_t scan_parts(const Source& source, size_t n, size_t k,
                  Guess<typename Bits<Storage>::Key> guess, Parts<Storage>& parts) {
    parallel(parts.size(), [&](size_t part) {
        parts[part].restart(split_point(n, part, parts.size()), guess.threshold);
        parts[part].reserve(guess.expected / parts.size() + 2 * kBlock);
        scan(source, split_point(n, part + 1, parts.size()), k, parts[part]);
    });
    size_t total = 0;
    for (const auto& part : parts) total += part.count;
    return total;
}

template <class Storage>
auto cut_parts(Parts<Storage>& parts, size_t total, size_t k) {
    using Key = typename Bits<Storage>::Key;
    if (total <= k || parts.size() == 1) return parts[0].find_cut(k);
    Buffer<Key> keys(total), spare;
    Key* end = keys.data();
    for (const auto& part : parts) end = std::copy_n(part.keys(), part.count, end);
    return Survivors<Storage>::cut_of(keys.data(), total, k, spare);
}

// Writes the `total` entries that the cut picks of all parts; the first parts have its ties.
template <class Index, class Storage>
Selection<Index, Storage> write_parts(const Parts<Storage>& parts, size_t total,
                                      Cut<typename Bits<Storage>::Key> cut) {
    Selection<Index, Storage> result(total);
    result.count = total;
    std::vector<Cut<typename Bits<Storage>::Key>> cuts;
    std::vector<size_t> starts{0};
    for (const auto& part : parts) {
        cuts.push_back(cut);
        const bool last = cuts.size() == parts.size();
        starts.push_back(last ? total : starts.back() + part.count_picked(cut));
    }
    parallel(parts.size(), [&](size_t part) {
        const size_t start = starts[part];
        parts[part].write(cuts[part], result.indices.data() + start, result.values.data() + start,
                          starts[part + 1] - start);
    });
    return result;
}

}  // namespace detail

// Selects the min(k, nnz) largest magnitudes of [0, n). The first pass reads `first`; if too few
// entries survive it, another pass reads `again`. Raises `largest` to the largest of the first.
template <class Index, class Storage, class Source>
Selection<Index, Storage> select_largest(const Source& first, const Vector<Storage>& again,
                                         size_t n, size_t k, int threads,
                                         typename Bits<Storage>::Key& largest) {
    auto parts = detail::make_parts<Storage>(n, threads);
    auto guess = detail::guess_threshold(first, 0, n, k, 1);
    size_t total = detail::scan_parts(first, n, k, guess, parts);
    for (const auto& part : parts) largest = std::max(largest, part.largest);
    // The sample was misleading: the next threshold is far lower, the one after lets all nonzeros
    // through.
    for (int attempt = 1; total < k && guess.threshold > 1; ++attempt) {
        if (attempt == 1) {
            guess = detail::guess_threshold(again, 0, n, k, 16);
        } else {
            guess.threshold = 1;
        }
        total = detail::scan_parts(again, n, k, guess, parts);
    }
    const auto cut = detail::cut_parts(parts, total, k);
    return detail::write_parts<Index>(parts, std::min(k, total), cut);
}

// Selects all entries whose magnitude is at least `threshold` > 0.
template <class Index, class Storage>
Selection<Index, Storage> select_reaching(const Vector<Storage>& x, size_t n,
                                          typename Bits<Storage>::Key threshold, int threads) {
    auto parts = detail::make_parts<Storage>(n, threads);
    const size_t total = detail::scan_parts(x, n, kUnlimited, {threshold, 0}, parts);
    return detail::write_parts<Index>(parts, total, {0, 0});
}

}  // namespace sparcel
