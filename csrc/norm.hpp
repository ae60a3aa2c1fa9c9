// The sum of squares of a vector, in float64.
#pragma once

#include <algorithm>
#include <cstddef>

#include "buffer.hpp"
#include "numbers.hpp"
#include "parallel.hpp"

namespace sparcel {
namespace detail {

// Entries that are summed together, before blocks are added one after another. So the order of the
// sums depends neither on the number of threads nor on the instruction set.
constexpr size_t kSummed = 4096;
constexpr size_t kSums = 8;  // side by side

template <class T>
double sum_of_squares(const T* x, size_t n) {
    if constexpr (sizeof(T) == 2) {
        float wide[kSummed];
        for (size_t i = 0; i < n; ++i) wide[i] = widen(x[i]);
        return sum_of_squares(wide, n);
    } else {
        double sums[kSums] = {};
        size_t i = 0;
        for (; i + kSums <= n; i += kSums) {
            for (size_t j = 0; j < kSums; ++j) sums[j] += double(x[i + j]) * double(x[i + j]);
        }
        for (; i < n; ++i) sums[0] += double(x[i]) * double(x[i]);
        double total = 0;
        for (const double sum : sums) total += sum;
        return total;
    }
}

}  // namespace detail

template <class T>
double squared_norm(const T* x, size_t n, int threads) {
    const size_t blocks = (n + detail::kSummed - 1) / detail::kSummed;
    Buffer<double> sums(blocks);
    const size_t tasks = useful_threads(n, threads);
    parallel(tasks, [&](size_t task) {
        const size_t end = split_point(blocks, task + 1, tasks);
        for (size_t block = split_point(blocks, task, tasks); block < end; ++block) {
            const size_t at = block * detail::kSummed;
            sums[block] = detail::sum_of_squares(x + at, std::min(detail::kSummed, n - at));
        }
    });
    double total = 0;
    for (size_t block = 0; block < blocks; ++block) total += sums[block];
    return total;
}

}  // namespace sparcel
