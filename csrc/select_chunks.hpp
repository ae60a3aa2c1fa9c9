// Selection within every chunk of a vector: SparCML's buckets, ScaleCom's chunks.
#pragma once

#include "select.hpp"

namespace sparcel {
namespace detail {

// Longer chunks than this are sampled; shorter ones learn their threshold from those before.
constexpr size_t kSampledChunk = size_t{1} << 16;

// Chunks that are sampled once their predecessors have misled.
constexpr int kSampledChunks = 16;

// Follows the threshold from chunk to chunk, so that a few more than k survive: on data without
// order, as many more that one chunk in twenty or so has to be read twice.
template <class Key>
class Follower {
  public:
    // `step` is the distance of a factor of two between magnitudes, as bits.
    Follower(size_t k, Key step) : k_(k), step_(step), target_(k + 2 * size_t(std::sqrt(k)) + 1) {}

    // Whether far too much came through lately, as where values rise or fall.
    bool sampling() const { return sampling_ > 0; }

    // The threshold for [begin, end): what the chunks before suggest, or, when that has misled,
    // what a few of the chunk's own entries do.
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
    int sampling_ = 0;  // chunks that are still to be sampled
};

// Like scan, in steps so short that a crowd is pruned before it is complete.
template <class Source, class Storage>
void scan_crowd(const Source& source, size_t end, size_t k, Survivors<Storage>& survivors) {
    constexpr size_t step = 64;
    for (size_t i = survivors.begin; i < end; i += step) {
        if (survivors.count >= 2 * k + step) survivors.prune(k);
        survivors.make_room(k);
        source.pass(i, std::min(step, end - i), survivors);
    }
}

// Finds at least min(k, nnz) of one chunk, beginning at `guess`, and tells whether it took more
// than one pass. What `first` reads once must be readable from `again` afterwards. `crowded` says
// that far too many may survive.
template <class Source, class Storage>
bool scan_chunk(const Source& first, const Vector<Storage>& again, size_t begin, size_t end,
                size_t k, typename Bits<Storage>::Key guess, typename Bits<Storage>::Key step,
                bool crowded, Survivors<Storage>& survivors) {
    using Key = typename Bits<Storage>::Key;
    survivors.restart(begin, guess);
    crowded ? scan_crowd(first, end, k, survivors) : scan(first, end, k, survivors);
    // The steps grow, so that a chunk far smaller than its neighbour is found soon enough.
    bool repeated = false;
    for (step /= 4; survivors.count < k && guess > 1; step *= 4, repeated = true) {
        guess = Follower<Key>::lowered(guess, step);
        survivors.restart(begin, guess);
        scan(again, end, k, survivors);
    }
    return repeated;
}

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
    Selection<Index, Storage> result(std::min(n, chunks * per_chunk));
    std::vector<size_t> counts(tasks, 0);
    std::vector<Key> met(tasks, 0);
    parallel(tasks, [&](size_t task) {
        Survivors<Storage> survivors;
        detail::Follower<Key> follower(k, step);
        const size_t start = split_point(chunks, task, tasks);
        Index* indices = result.indices.data() + start * per_chunk;
        Storage* values = result.values.data() + start * per_chunk;
        for (size_t c = start; c < split_point(chunks, task + 1, tasks); ++c) {
            const size_t begin = c * chunk;
            const size_t end = std::min(n, begin + chunk);
            const Key guess = chunk > detail::kSampledChunk
                                  ? detail::guess_threshold(first, begin, end, k, 1).threshold
                                  : follower.guess(first, begin, end);
            const bool repeated = detail::scan_chunk(first, again, begin, end, k, guess, step,
                                                     follower.sampling(), survivors);
            const size_t survived = survivors.count;
            auto cut = survivors.find_cut(k);
            follower.learn(survived, end - begin, cut, repeated);
            const size_t room = std::min(k, survivors.count);
            counts[task] +=
                survivors.write(cut, indices + counts[task], values + counts[task], room);
        }
        met[task] = survivors.largest;
    });
    // Chunks with fewer than k nonzeros leave gaps between what the tasks wrote.
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
