// Counts of a field of the magnitudes' bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/parallel.hpp"
#include "simd/bits.hpp"

namespace sparcel {

struct Field {
    int shift;
    size_t bins;  // a power of two, 2^width
    int width;
    bool restricted;
    uint64_t prefix;  // of the bits above the field, where restricted
};

namespace detail {

template <class Storage>
void count_field(const Storage* x, size_t n, const Field& field, int64_t* counts) {
    constexpr Storage mask = Bits<Storage>::magnitude;
    for (size_t i = 0; i < n; ++i) {
        const uint64_t magnitude = load_bits(x + i) & mask;
        if (magnitude == 0) continue;
        const uint64_t upper = magnitude >> field.shift;
        if (field.restricted && upper >> field.width != field.prefix) continue;
        ++counts[upper & (field.bins - 1)];
    }
}

}  // namespace detail

template <class Storage>
void magnitude_histogram(const Storage* x, size_t n, const Field& field, int threads,
                         int64_t* counts) {
    std::vector<std::vector<int64_t>> parts(useful_threads(n, threads));
    parallel(parts.size(), [&](size_t part) {
        parts[part].assign(field.bins, 0);
        const size_t begin = split_point(n, part, parts.size());
        const size_t end = split_point(n, part + 1, parts.size());
        detail::count_field(x + begin, end - begin, field, parts[part].data());
    });
    std::fill_n(counts, field.bins, 0);
    for (const auto& part : parts) {
        for (size_t bin = 0; bin < field.bins; ++bin) counts[bin] += part[bin];
    }
}

}  // namespace sparcel
