// Sparse rows of hashed n-grams, as scikit-learn's HashingVectorizer makes them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "buffer.hpp"
#include "ngrams.hpp"
#include "parallel.hpp"
#include "row_hasher.hpp"

namespace sparcel {

// Document i is text[offsets[i]] to text[offsets[i + 1]].
struct Documents {
    size_t bytes(size_t from, size_t to) const { return size_t(offsets[to] - offsets[from]); }

    const uint8_t* text;
    const int64_t* offsets;
    size_t count;
};

template <class Index>
struct HashedRows {
    Buffer<int64_t> offsets;
    Entries<Index> entries;
};

namespace detail {

// The fewest bytes of text for which another thread pays.
constexpr size_t kTextPerThread = size_t{1} << 14;

// The bounds of ranges of documents that have about the same number of bytes.
inline std::vector<size_t> split_documents(const Documents& documents, int threads) {
    const size_t bytes = documents.bytes(0, documents.count);
    const size_t parts =
        std::clamp<size_t>(bytes / kTextPerThread, 1, size_t(std::max(threads, 1)));
    const int64_t* const offsets = documents.offsets;
    std::vector<size_t> bounds(parts + 1, documents.count);
    for (size_t part = 0; part < parts; ++part) {
        const int64_t start = offsets[0] + int64_t(split_point(bytes, part, parts));
        bounds[part] =
            size_t(std::lower_bound(offsets, offsets + documents.count, start) - offsets);
    }
    return bounds;
}

// Joins the rows of all parts; each part's offsets begin at zero.
template <class Index>
Entries<Index> join(std::vector<Entries<Index>>& parts, const std::vector<size_t>& bounds,
                    int64_t* offsets) {
    if (parts.size() == 1) return std::move(parts[0]);
    std::vector<size_t> starts(1);
    for (const Entries<Index>& part : parts) starts.push_back(starts.back() + part.count);
    Entries<Index> joined{Buffer<Index>(starts.back()), Buffer<float>(starts.back()),
                          starts.back()};
    parallel(parts.size(), [&](size_t p) {
        const Entries<Index> part = std::move(parts[p]);
        std::copy_n(part.columns.data(), part.count, joined.columns.data() + starts[p]);
        std::copy_n(part.values.data(), part.count, joined.values.data() + starts[p]);
        for (size_t i = bounds[p]; i < bounds[p + 1]; ++i) offsets[i + 1] += int64_t(starts[p]);
    });
    return joined;
}

}  // namespace detail

template <class Index>
HashedRows<Index> hash_rows(const Documents& documents, const NgramSettings& ngrams,
                            const HashSettings& hash, int threads) {
    const std::vector<size_t> bounds = detail::split_documents(documents, threads);
    std::vector<Entries<Index>> parts(bounds.size() - 1);
    Buffer<int64_t> offsets(documents.count + 1);
    offsets[0] = 0;
    parallel(parts.size(), [&](size_t p) {
        RowHasher<Index> hasher(ngrams, hash, documents.bytes(bounds[p], bounds[p + 1]));
        for (size_t i = bounds[p]; i < bounds[p + 1]; ++i) {
            offsets[i + 1] =
                hasher.add(documents.text + documents.offsets[i], documents.bytes(i, i + 1));
        }
        parts[p] = hasher.finish();
    });
    Entries<Index> entries = detail::join(parts, bounds, offsets.data());
    return {std::move(offsets), std::move(entries)};
}

}  // namespace sparcel
