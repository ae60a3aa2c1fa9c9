// The sums of squares of many vectors, in float64.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/buffer.hpp"
#include "base/numbers.hpp"
#include "base/parallel.hpp"

namespace sparcel {
namespace detail {

// Entries that are summed together, before blocks are added one after another. So the order of the
// sums depends neither on the number of threads nor on the instruction set.
constexpr size_t kSummed = 4096;
constexpr size_t kSums = 8;  // side by side

// The sum of map(x) over at most kSummed entries.
template <class T, class Map>
double sum_of_block(const T* x, size_t n, const Map& map) {
    if constexpr (sizeof(T) == 2) {
        float wide[kSummed];
        for (size_t i = 0; i < n; ++i) wide[i] = widen(x[i]);
        return sum_of_block(wide, n, map);
    } else {
        double sums[kSums] = {};
        size_t i = 0;
        for (; i + kSums <= n; i += kSums) {
            for (size_t j = 0; j < kSums; ++j) sums[j] += map(double(x[i + j]));
        }
        for (; i < n; ++i) sums[0] += map(double(x[i]));
        double total = 0;
        for (const double sum : sums) total += sum;
        return total;
    }
}

template <class T>
double sum_of_squares(const void* x, size_t start, size_t stop) {
    double total = 0;
    for (size_t i = start; i < stop; i += kSummed) {
        total += sum_of_block(static_cast<const T*>(x) + i, std::min(kSummed, stop - i),
                              [](double value) { return value * value; });
    }
    return total;
}

}  // namespace detail

// A vector of any dtype.
struct Squared {
    const void* x;
    size_t n;
    double (*sum)(const void* x, size_t start, size_t stop);
};

template <class T>
Squared squared(const T* x, size_t n) {
    return {x, n, detail::sum_of_squares<T>};
}

// Writes the sum of each vector: those of its chunks, one after another. A chunk that is given as
// a vector has the same sum, so whoever divides the work at chunks gets the same bits.
inline void sums_of_squares(const std::vector<Squared>& vectors, size_t chunk, int threads,
                            double* out) {
    struct Chunk {
        const Squared* vector;
        size_t start, stop;
        size_t before;  // entries of the chunks before this one
    };
    std::vector<Chunk> chunks;
    size_t entries = 0;
    for (const Squared& vector : vectors) {
        for (size_t start = 0; start < vector.n; start += chunk) {
            chunks.push_back({&vector, start, std::min(start + chunk, vector.n), entries});
            entries += chunks.back().stop - start;
        }
    }
    Buffer<double> sums(chunks.size());
    const size_t tasks = useful_threads(entries, threads);
    parallel(tasks, [&](size_t task) {
        const size_t from = split_point(entries, task, tasks);
        const size_t to = split_point(entries, task + 1, tasks);
        for (size_t i = 0; i < chunks.size(); ++i) {
            const auto& [vector, start, stop, before] = chunks[i];
            if (from <= before && before < to) sums[i] = vector->sum(vector->x, start, stop);
        }
    });
    std::fill_n(out, vectors.size(), 0.0);
    for (size_t i = 0; i < chunks.size(); ++i) out[chunks[i].vector - vectors.data()] += sums[i];
}

}  // namespace sparcel
