// Sparse rows of hashed n-grams, as scikit-learn's HashingVectorizer makes them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/parallel.hpp"
#include "rows/ngrams.hpp"
#include "rows/row_hasher.hpp"

namespace sparcel {

template <class Index>
struct HashedRows {
    explicit HashedRows(size_t documents) : offsets(documents + 1), columns(0), values(0) {
        offsets[0] = 0;
    }

    // Makes room for `entries` and, if they come from a share of all documents, for the rest.
    void reserve(size_t entries, double share) {
        if (entries <= columns.capacity()) return;
        const auto capacity = size_t(double(entries) * (0.1 + 1 / share));
        columns.resize(capacity);
        values.resize(capacity);
    }

    Buffer<int64_t> offsets;
    Buffer<Index> columns;
    Buffer<float> values;
    size_t count = 0;
};

namespace detail {

// A thread's bytes of text in a round: at least what is worth a thread's while, and at most what
// makes some 10 MB of entries; with less, threads wait for one another more often.
constexpr size_t kLeastShare = size_t{1} << 14, kMostShare = size_t{1} << 20;

// The end of the documents from `from` that have `share` bytes, or all that are left.
inline size_t end_of_share(const Documents& documents, size_t from, size_t share) {
    if (from == documents.count) return from;
    const int64_t* const offsets = documents.offsets;
    const int64_t* const end = std::lower_bound(offsets + from + 1, offsets + documents.count,
                                                offsets[from] + int64_t(share));
    return size_t(end - offsets);
}

}  // namespace detail

// In each round, threads hash a share of the documents each and then copy the entries to where they
// belong. So only the result takes fresh memory, which costs more than what is written there.
template <class Index>
HashedRows<Index> hash_rows(const Documents& documents, const NgramSettings& ngrams,
                            const HashSettings& hash, int threads) {
    const size_t bytes = documents.bytes(0, documents.count), most = size_t(std::max(threads, 1));
    const size_t share = std::clamp(bytes / most + 1, detail::kLeastShare, detail::kMostShare);
    std::vector<RowHasher<Index>> hashers;
    for (size_t left = std::min(bytes / share + 1, most); left > 0; --left) {
        hashers.emplace_back(ngrams, hash);
    }
    const size_t parts = hashers.size();
    std::vector<size_t> bounds(parts + 1), starts(parts + 1);  // documents, entries
    HashedRows<Index> rows(documents.count);
    while (bounds.back() < documents.count) {
        bounds[0] = bounds.back();
        starts[0] = starts.back();
        for (size_t p = 0; p < parts; ++p) {
            bounds[p + 1] = detail::end_of_share(documents, bounds[p], share);
        }
        parallel(parts, [&](size_t p) {
            hashers[p].hash(documents, bounds[p], bounds[p + 1], rows.offsets.data());
        });
        for (size_t p = 0; p < parts; ++p) starts[p + 1] = starts[p] + hashers[p].count();
        rows.reserve(starts.back(), double(documents.bytes(0, bounds.back())) / double(bytes));
        parallel(parts, [&](size_t p) {
            hashers[p].copy_to(rows.columns.data() + starts[p], rows.values.data() + starts[p]);
            for (size_t i = bounds[p]; i < bounds[p + 1]; ++i) {
                rows.offsets[i + 1] += int64_t(starts[p]);
            }
        });
    }
    rows.count = starts.back();
    return rows;
}

}  // namespace sparcel
