// Selection within every chunk of a vector: SparCML's buckets, ScaleCom's chunks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "base/parallel.hpp"
#include "simd/bits.hpp"
#include "simd/kernels.hpp"
#include "streams/kth.hpp"
#include "streams/select.hpp"
#include "streams/sources.hpp"
#include "streams/survivors.hpp"

namespace sparcel {
namespace detail {

// Longer chunks than this are sampled. In shorter ones, a small k takes two passes, the second from
// the cache; for a larger k, the threshold is learnt from the chunks before.
constexpr size_t kSampledChunk = size_t{1} << 16;

// Sums of this many entries, in whole chunks, are computed before selection; they fit the cache.
constexpr size_t kSettled = size_t{1} << 11;

// How many chunks are sampled after the threshold of earlier chunks was misleading.
constexpr int kSampledChunks = 16;

// Adapts the threshold from chunk to chunk, so that slightly more than k survive. On unordered
// data, about one chunk in twenty has to be read twice.
template <class Key>
class Follower {
  public:
    // `step` is the difference in bits of two magnitudes that differ by a factor of two.
    Follower(size_t k, Key step) : k_(k), step_(step), target_(k + 2 * size_t(std::sqrt(k)) + 1) {}

    // Whether far too many entries survived lately, as happens if values rise or fall.
    bool sampling() const { return sampling_ > 0; }

    // Returns the threshold for [begin, end), learnt from the chunks before. If that was
    // misleading, it is estimated from a sample of the chunk itself.
    template <class Source>
    Key guess(const Source& source, size_t begin, size_t end) const {
        if (!sampling() || end - begin < 2 * kFewSamples) return guess_;
        const Key mask = Bits<typename Source::Word>::magnitude;
        const auto key = [&](size_t i) { return source.at(begin + i); };
        return std::max<Key>(1, sampled_limit<Key>(key, end - begin, k_, mask));
    }

    void learn(size_t survived, size_t length, const Cut<Key>& cut, bool repeated) {
        const bool crowded = survived > std::max(4 * target_, length / 4);
        if (crowded) {
            sampling_ = kSampledChunks;
        } else if (sampling_ > 0) {
            --sampling_;
        }
        const bool known = cut.kth > 0;  // else no more than k survived
        if (known && (repeated || crowded)) {
            guess_ = lowered(cut.kth, step_ / 8);
        } else if (survived > target_) {
            guess_ = std::min<Key>(guess_ + step_ / 64, cut.kth);
        } else {
            guess_ = lowered(guess_, step_ / 64);
        }
    }

    static Key lowered(Key threshold, Key by) { return threshold > by + 1 ? threshold - by : 1; }

  private:
    size_t k_;
    Key step_;
    size_t target_;
    Key guess_ = 1;
    int sampling_ = 0;  // how many more chunks to sample
};

// Like scan, but in short steps, so that survivors are pruned before there are too many.
template <class Source, class Storage>
void scan_crowd(const Source& source, size_t end, size_t k, Survivors<Storage>& survivors) {
    constexpr size_t step = 64;
    for (size_t i = survivors.begin; i < end; i += step) {
        if (survivors.count >= 2 * k + step) survivors.prune(k);
        survivors.make_room(k);
        source.pass(i, std::min(step, end - i), survivors);
    }
}

// Finds at least min(k, nnz) entries of one chunk, starting with the threshold `guess`. Returns
// whether it took more than one pass. Entries that `first` has read must be readable from `again`.
// `crowded` means that far too many may survive.
template <class Source, class Storage>
bool scan_chunk(const Source& first, const Vector<Storage>& again, size_t begin, size_t end,
                size_t k, typename Bits<Storage>::Key guess, typename Bits<Storage>::Key step,
                bool crowded, Survivors<Storage>& survivors) {
    using Key = typename Bits<Storage>::Key;
    survivors.restart(begin, guess);
    crowded ? scan_crowd(first, end, k, survivors) : scan(first, end, k, survivors);
    // The steps grow, so that few passes suffice for a chunk of far smaller values.
    bool repeated = false;
    for (step /= 4; survivors.count < k && guess > 1; repeated = true) {
        guess = Follower<Key>::lowered(guess, step);
        step = std::max<Key>(step, step * 4);  // the last product, 0, would never end this
        survivors.restart(begin, guess);
        scan(again, end, k, survivors);
    }
    return repeated;
}

// Selects from consecutive chunks, and writes the selected entries one after another.
template <class Index, class Storage>
class ChunkSelector {
  public:
    using Key = typename Bits<Storage>::Key;

    Survivors<Storage> survivors;
    size_t written = 0;

    ChunkSelector(size_t k, Key step, Index* indices, Storage* values)
        : k_(k), step_(step), follower_(k, step), indices_(indices), values_(values) {}

    // Selects 1 to kFew entries. The time does not depend on the data, except for ties.
    void select_few(const Storage* x, size_t begin, size_t end) {
        const auto& readers = kernels().readers<Storage>();
        if (k_ == 1) {
            const size_t at = begin + readers.first_largest(x + begin, end - begin);
            const Storage bits = load_bits(x + at);
            indices_[written] = Index(at);
            values_[written] = bits;
            written += (bits & Bits<Storage>::magnitude) > 0;
            return;
        }
        survivors.restart(begin, 1);
        survivors.reserve(2 * (end - begin));
        Key floor;
        survivors.count = readers.few_largest(x + begin, end - begin, k_, survivors.tail(), &floor);
        write(survivors.find_cut_above(floor, k_));
    }

    // Selects any number. Entries that `first` has read must be readable from `again`.
    template <class Source>
    void select(const Source& first, const Vector<Storage>& again, size_t begin, size_t end) {
        const bool sampled = end - begin > kSampledChunk;
        const Key guess = sampled ? guess_threshold(first, begin, end, k_, 1).threshold
                                  : follower_.guess(first, begin, end);
        const bool repeated =
            scan_chunk(first, again, begin, end, k_, guess, step_, follower_.sampling(), survivors);
        const size_t survived = survivors.count;
        const Cut<Key> cut = survivors.find_cut(k_);
        follower_.learn(survived, end - begin, cut, repeated);
        write(cut);
    }

  private:
    void write(Cut<Key> cut) {
        const size_t room = std::min(k_, survivors.count);
        written += survivors.write(cut, indices_ + written, values_ + written, room);
    }

    size_t k_;
    Key step_;
    Follower<Key> follower_;
    Index* indices_;
    Storage* values_;
};

}  // namespace detail

// Selects the min(k, nnz) largest magnitudes of every `chunk` consecutive entries of [0, n).
template <class Index, class Storage, class Source>
Selection<Index, Storage> select_chunks(const Source& first, const Vector<Storage>& again, size_t n,
                                        size_t k, size_t chunk, int threads,
                                        typename Bits<Storage>::Key step,
                                        typename Bits<Storage>::Key& largest) {
    using Key = typename Bits<Storage>::Key;
    const size_t chunks = (n + chunk - 1) / chunk;
    const size_t per_chunk = std::min(k, chunk);
    const size_t tasks = std::min(useful_threads(n, threads), std::max<size_t>(chunks, 1));
    const bool few = per_chunk > 0 && per_chunk <= kFew && chunk <= detail::kSampledChunk;
    const size_t together = few ? std::max<size_t>(detail::kSettled / chunk, 1) * chunk : chunk;
    Selection<Index, Storage> result(std::min(n, chunks * per_chunk));
    std::vector<size_t> counts(tasks, 0);
    std::vector<Key> met(tasks, 0);
    parallel(tasks, [&](size_t task) {
        const size_t start = split_point(chunks, task, tasks);
        const size_t stop = std::min(n, split_point(chunks, task + 1, tasks) * chunk);
        detail::ChunkSelector<Index, Storage> selector(per_chunk, step,
                                                       result.indices.data() + start * per_chunk,
                                                       result.values.data() + start * per_chunk);
        for (size_t from = start * chunk; from < stop; from += together) {
            const size_t to = std::min(stop, from + together);
            if (!few) {
                selector.select(first, again, from, to);
                continue;
            }
            first.settle(from, to, selector.survivors);
            for (size_t begin = from; begin < to; begin += chunk) {
                const size_t end = std::min(to, begin + chunk);
                first.fetch(std::min(stop, begin + together), std::min(stop, end + together));
                selector.select_few(again.x, begin, end);
            }
        }
        counts[task] = selector.written;
        met[task] = selector.survivors.largest;
    });
    // Chunks with fewer than k nonzeros leave gaps between the outputs of the tasks.
    for (size_t task = 0; task < tasks; ++task) {
        const size_t from = split_point(chunks, task, tasks) * per_chunk;
        std::copy_n(result.indices.data() + from, counts[task],
                    result.indices.data() + result.count);
        std::copy_n(result.values.data() + from, counts[task], result.values.data() + result.count);
        result.count += counts[task];
        largest = std::max(largest, met[task]);
    }
    return result;
}

}  // namespace sparcel
