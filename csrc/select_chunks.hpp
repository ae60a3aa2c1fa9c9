// Selection within every chunk of a vector: SparCML's buckets, ScaleCom's chunks.
#pragma once

#include "select.hpp"

namespace sparcel {
namespace detail {

// Longer chunks than this are sampled; for shorter ones their neighbour gives the threshold.
constexpr size_t kSampledChunk = size_t{1} << 16;

// One power of two, for magnitudes as bits.
template <class Storage>
constexpr typename Bits<Storage>::Key exponent_step(int mantissa_bits) {
    return typename Bits<Storage>::Key{1} << mantissa_bits;
}

// Finds at least min(k, nnz) of one chunk, beginning at `guess`; what `first` reads once must be
// readable from `again` afterwards.
template <class Source, class Storage>
void scan_chunk(const Source& first, const Vector<Storage>& again, size_t begin, size_t end,
                size_t k, typename Bits<Storage>::Key guess, typename Bits<Storage>::Key step,
                Survivors<Storage>& survivors) {
    using Key = typename Bits<Storage>::Key;
    survivors.restart(begin, guess);
    scan(first, end, k, survivors);
    // The steps double, so that a chunk far smaller than its neighbour is found soon enough.
    for (Key lowered = guess; survivors.count < k && lowered > 1; step *= 4) {
        lowered = lowered > step + 1 ? lowered - step : 1;
        survivors.restart(begin, lowered);
        scan(again, end, k, survivors);
    }
}

}  // namespace detail

// Selects the min(k, nnz) largest magnitudes of every `chunk` consecutive entries of [0, n).
// `step` is the distance of a factor of two between magnitudes, as bits.
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
        Key guess = 1;
        size_t& written = counts[task];
        const size_t last = split_point(chunks, task + 1, tasks);
        const size_t at = split_point(chunks, task, tasks) * per_chunk;
        for (size_t c = split_point(chunks, task, tasks); c < last; ++c) {
            const size_t begin = c * chunk;
            const size_t end = std::min(n, begin + chunk);
            if (chunk > detail::kSampledChunk) {
                guess = detail::guess_threshold(first, begin, end, k, 1).threshold;
            }
            detail::scan_chunk(first, again, begin, end, k, guess, step, survivors);
            auto cut = survivors.find_cut(k);
            // A little below this chunk's limit, so that the next one has enough survivors.
            const Key margin = step / 4;
            guess = cut.kth > margin ? cut.kth - margin : 1;
            written +=
                survivors.write(cut, result.indices.data() + at + written,
                                result.values.data() + at + written, std::min(k, survivors.count));
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
