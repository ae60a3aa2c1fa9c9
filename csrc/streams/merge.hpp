// Reduction of sorted streams to one: two streams in step, few entries by sorting, the rest in
// windows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/numbers.hpp"
#include "base/parallel.hpp"
#include "streams/merge_pair.hpp"
#include "streams/merge_windows.hpp"

namespace sparcel {
namespace detail {

// Entries are sorted if all streams together have at most this many.
constexpr size_t kFewEntries = 1 << 12;

// Merges few entries by sorting them, because clearing a window's bitmap would take longer.
template <class Op, class Index, class Value>
Merged<Index, Value> merge_few(std::span<const StreamView<Index, Value>> streams, size_t entries,
                               size_t width) {
    struct Entry {
        Index index;
        const Value* row;
    };
    std::vector<Entry> sorted, merged(entries);
    sorted.reserve(entries);
    for (const auto& stream : streams) {
        const auto middle = sorted.size();
        for (size_t i = 0; i < stream.count; ++i) {
            sorted.push_back({stream.indices[i], stream.values + i * width});
        }
        // Equal indices keep the order of the streams.
        std::merge(sorted.begin(), sorted.begin() + middle, sorted.begin() + middle, sorted.end(),
                   merged.begin(),
                   [](const Entry& a, const Entry& b) { return a.index < b.index; });
        std::copy_n(merged.begin(), sorted.size(), sorted.begin());
    }
    Merged<Index, Value> result{Buffer<Index>(entries), Buffer<Value>(entries * width), 0};
    std::vector<typename Wide<Value>::Type> sum(width);
    for (size_t i = 0; i < entries; ++result.count) {
        const Index index = sorted[i].index;
        for (size_t w = 0; w < width; ++w) sum[w] = widen(sorted[i].row[w]);
        for (++i; i < entries && sorted[i].index == index; ++i) {
            for (size_t w = 0; w < width; ++w) sum[w] = Op::apply(sum[w], widen(sorted[i].row[w]));
        }
        result.indices[result.count] = index;
        Value* row = result.values.data() + result.count * width;
        for (size_t w = 0; w < width; ++w) row[w] = narrow<Value>(sum[w]);
    }
    return result;
}

template <class Index, class Value>
Merged<Index, Value> join(const std::vector<Merged<Index, Value>>& parts, size_t width) {
    Merged<Index, Value> result;
    for (const auto& part : parts) result.count += part.count;
    result.indices.resize(result.count);
    result.values.resize(result.count * width);
    Index* indices = result.indices.data();
    Value* values = result.values.data();
    for (const auto& part : parts) {
        indices = std::copy_n(part.indices.data(), part.count, indices);
        values = std::copy_n(part.values.data(), part.count * width, values);
    }
    return result;
}

}  // namespace detail

// Reduces streams, each sorted and without duplicates. If several hold an index, `Op` is applied
// from left to right. Halves are reduced in float32 and rounded once.
template <class Op, class Index, class Value>
Merged<Index, Value> merge(std::span<const StreamView<Index, Value>> streams, size_t width,
                           int threads) {
    if (streams.size() == 2) return merge_pair<Op>(streams[0], streams[1], width);
    size_t entries = 0;
    const StreamView<Index, Value>* longest = streams.data();
    for (const auto& stream : streams) {
        entries += stream.count;
        if (stream.count > longest->count) longest = &stream;
    }
    if (entries <= detail::kFewEntries) {
        return detail::merge_few<Op>(streams, entries, width);
    }
    // Each thread takes a range of indices that holds an equal share of the longest stream.
    std::vector<Merged<Index, Value>> parts(useful_threads(entries * width, threads));
    const auto bound = [&](size_t part) {
        if (part == 0) return Index{0};
        if (part == parts.size()) return std::numeric_limits<Index>::max();
        return longest->indices[longest->count * part / parts.size()];
    };
    parallel(parts.size(), [&](size_t part) {
        detail::Merger<Op, Index, Value> merger(streams, width);
        parts[part] = merger.run(bound(part), bound(part + 1));
    });
    return parts.size() == 1 ? std::move(parts[0]) : detail::join(parts, width);
}

}  // namespace sparcel
