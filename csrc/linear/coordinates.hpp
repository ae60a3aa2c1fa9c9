// Coordinate descent on linear models: a shard of rows by columns, partial derivatives, margins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/buffer.hpp"
#include "base/parallel.hpp"
#include "linear/columns.hpp"
#include "linear/linear.hpp"
#include "linear/losses.hpp"

namespace sparcel {

// Turns rows into columns: column c gets the entries starts[c] to starts[c + 1], its rows
// increasing. Each thread reads all entries and writes those of its own range of columns.
template <class Column, class Value>
void transpose(const Csr<Column, Value>& source, size_t height, size_t dimensions, int threads,
               int64_t* starts, int32_t* rows, Value* values) {
    const size_t entries = size_t(source.offsets[height]);
    const size_t tasks = useful_threads(entries, threads);
    std::fill_n(starts, dimensions + 1, 0);
    parallel(tasks, [&](size_t task) {
        const size_t first = split_point(dimensions, task, tasks);
        const size_t count = split_point(dimensions, task + 1, tasks) - first;
        for (size_t at = 0; at < entries; ++at) {
            const size_t column = size_t(source.columns[at]) - first;
            if (column < count) ++starts[first + column + 1];
        }
    });
    for (size_t column = 0; column < dimensions; ++column) starts[column + 1] += starts[column];
    // Ranges of about equally many entries. What is written moves each start on to the next one.
    std::vector<size_t> bounds(tasks + 1, 0);
    for (size_t task = 1; task < tasks; ++task) {
        const auto entry = int64_t(split_point(entries, task, tasks));
        bounds[task] = size_t(std::lower_bound(starts, starts + dimensions, entry) - starts);
    }
    bounds[tasks] = dimensions;
    parallel(tasks, [&](size_t task) {
        const size_t first = bounds[task], count = bounds[task + 1] - first;
        for (size_t row = 0; row < height; ++row) {
            for (int64_t at = source.offsets[row]; at < source.offsets[row + 1]; ++at) {
                const size_t column = size_t(source.columns[at]) - first;
                if (column >= count) continue;
                const int64_t to = starts[first + column]++;
                rows[to] = int32_t(row);
                values[to] = source.values[at];
            }
        }
    });
    std::memmove(starts + 1, starts, dimensions * sizeof(int64_t));
    starts[0] = 0;
}

using ColumnList = std::span<const int64_t>;

// A shard of rows by columns. Work on some of its columns is cut into ranges of rows, which depend
// on the columns alone, so results have the same bits at any number of threads.
template <class Value>
struct ShardView {
    const int64_t* offsets;  // [columns + 1]
    const int32_t* rows;     // [entries], not decreasing in each column
    const Value* values;     // [entries]
    size_t height;

    size_t blocks(ColumnList columns) const {
        size_t entries = 0;
        for (const int64_t column : columns) {
            entries += size_t(offsets[column + 1] - offsets[column]);
        }
        return detail::block_count(entries, columns.size());
    }

    // Calls run(i, first, last) with the entries of columns[i] in one block of the rows.
    template <class Run>
    void visit(ColumnList columns, size_t block, size_t blocks, const Run& run) const {
        for (size_t i = 0; i < columns.size(); ++i) {
            if (i + detail::kAhead < columns.size()) fetch(columns[i + detail::kAhead]);
            const int64_t end = offsets[columns[i] + 1];
            const int64_t first = place(offsets[columns[i]], end, block, blocks);
            run(i, size_t(first), size_t(place(first, end, block + 1, blocks)));
        }
    }

  private:
    // Returns the first of the entries [at, end) that lies in a block of the rows or beyond.
    int64_t place(int64_t at, int64_t end, size_t block, size_t blocks) const {
        if (block == 0 || block == blocks) return block == 0 ? at : end;
        const auto row = int32_t(split_point(height, block, blocks));
        return std::lower_bound(rows + at, rows + end, row) - rows;
    }

    void fetch(int64_t column) const {
        __builtin_prefetch(rows + offsets[column]);
        __builtin_prefetch(values + offsets[column]);
    }
};

// Which columns a model changes at once.
struct Draw {
    ColumnList chosen;
    // Those of changes that were not yet known when the margins were read, and of changes that will
    // not know of these. No column is in two of the lists.
    ColumnList before, after;
};

namespace detail {

// A row's mark: how many of its entries are chosen, and whether others changed or will change it.
constexpr uint32_t kBefore = uint32_t{1} << 30, kAfter = uint32_t{1} << 31;

// The curvature that bounds what a row's loss gains from all changes of its margin together. If n
// entries are chosen, the square of their sum is at most n times the sum of their squares. A row
// that changes of other draws meet counts once more for each, with the largest curvature; see
// products/linear/coordinate_descent.py.
template <class L>
double safe_curvature(uint32_t mark, double curvature) {
    const uint32_t chosen = mark & (kBefore - 1);
    if (chosen == mark) return chosen * curvature;
    return chosen * L::kCurvature * (1 + bool(mark & kBefore) + bool(mark & kAfter));
}

}  // namespace detail

// Writes to sums, [chosen][width][2], the derivative of the rows' losses by each class's coordinate
// draw.chosen[i], and a curvature: the losses lie nowhere above the sum of the parabolas that these
// describe, whatever the chosen coordinates become. `marks` is zero for each row, and is again.
template <class L, class Value>
void differentiate(L, const ShardView<Value>& shard, const Draw& draw, const double* margins,
                   auto width, const Targets<Value>& targets, uint32_t* marks, int threads,
                   double* sums) {
    const size_t numbers = 2 * width * draw.chosen.size(), blocks = shard.blocks(draw.chosen);
    Buffer<double> parts(blocks * numbers);
    detail::in_blocks(blocks, threads, [&](size_t block) {
        const auto mark = [&](ColumnList columns, const auto& change) {
            shard.visit(columns, block, blocks, [&](size_t, size_t at, size_t last) {
                for (; at < last; ++at) change(size_t(shard.rows[at]));
            });
        };
        mark(draw.chosen, [&](size_t row) {
            ++marks[row];
            // Fetched one by one, in between the exponentials, these would be waited for.
            __builtin_prefetch(margins + row * width);
            __builtin_prefetch(targets.targets + row);
        });
        mark(draw.before, [&](size_t row) { marks[row] |= detail::kBefore; });
        mark(draw.after, [&](size_t row) { marks[row] |= detail::kAfter; });
        double* sum = parts.data() + block * numbers;
        shard.visit(draw.chosen, block, blocks, [&](size_t, size_t first, size_t last) {
            for (size_t k = 0; k < width; ++k, sum += 2) {
                double derivative = 0, curvature = 0;
                for (size_t at = first; at < last; ++at) {
                    const auto row = size_t(shard.rows[at]);
                    const double value = double(shard.values[at]);
                    const Slope slope =
                        L::slope(margins[row * width + k], targets.target(row, k, width));
                    const double weighted = targets.weight(row) * value;
                    derivative += weighted * slope.derivative;
                    curvature +=
                        weighted * value * detail::safe_curvature<L>(marks[row], slope.curvature);
                }
                sum[0] = derivative;
                sum[1] = curvature;
            }
        });
        for (const ColumnList columns : {draw.chosen, draw.before, draw.after}) {
            mark(columns, [&](size_t row) { marks[row] = 0; });
        }
    });
    std::fill_n(sums, numbers, 0.0);
    for (size_t block = 0; block < blocks; ++block) {
        for (size_t i = 0; i < numbers; ++i) sums[i] += parts[block * numbers + i];
    }
}

// Adds to the rows' margins, [height][width], what changes[i][k] of the coordinate columns[i] of
// class k makes of them.
template <class Value>
void change_margins(const ShardView<Value>& shard, ColumnList columns, const double* changes,
                    auto width, int threads, double* margins) {
    const size_t blocks = shard.blocks(columns);
    detail::in_blocks(blocks, threads, [&](size_t block) {
        shard.visit(columns, block, blocks, [&](size_t i, size_t at, size_t last) {
            const double* const change = changes + i * width;
            for (; at < last; ++at) {
                double* const margin = margins + size_t(shard.rows[at]) * width;
                for (size_t k = 0; k < width; ++k)
                    margin[k] += change[k] * double(shard.values[at]);
            }
        });
    });
}

// Returns the sum of the rows' losses, of all classes.
template <class L, class Value>
double sum_losses(L, const double* margins, size_t height, auto width,
                  const Targets<Value>& targets, int threads) {
    const size_t groups = height / detail::kBlockRows + 1;  // one of no rows, if there are none
    std::vector<double> sums(groups, 0.0);
    detail::in_blocks(groups, threads, [&](size_t group) {
        const size_t end = std::min((group + 1) * detail::kBlockRows, height);
        for (size_t row = group * detail::kBlockRows; row < end; ++row) {
            for (size_t k = 0; k < width; ++k) {
                const double target = targets.target(row, k, width);
                sums[group] += targets.weight(row) * L::at(margins[row * width + k], target).value;
            }
        }
    });
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

}  // namespace sparcel
