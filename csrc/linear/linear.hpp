// Steps of linear models on batches that are stored by columns.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "base/buffer.hpp"
#include "base/parallel.hpp"
#include "linear/columns.hpp"
#include "linear/lazy.hpp"
#include "linear/losses.hpp"

namespace sparcel {
namespace detail {

// What is summed together, before blocks are added one after another. Blocks depend on the batch
// alone, so the sums have the same bits at any number of threads.
constexpr size_t kBlockEntries = 1 << 14;
constexpr size_t kMostBlocks = 16;
constexpr size_t kSumEntries = 1 << 12;  // so that what a block of a sum visits lies in the caches
constexpr size_t kBlockRows = 1024;
constexpr size_t kLongColumn = 4;  // entries
constexpr size_t kAhead = 16;      // columns whose coordinate is fetched in advance

inline size_t block_count(size_t entries, size_t height) {
    const size_t wanted = std::min(entries / kBlockEntries, entries / (8 * height + 1));
    return std::clamp<size_t>(wanted, 1, kMostBlocks);
}

// Calls run(block) for each block, on up to `threads` threads. Each takes the next block when it is
// done with one, so none waits long for another.
template <class Run>
void in_blocks(size_t blocks, int threads, const Run& run) {
    const size_t tasks = std::clamp<size_t>(size_t(std::max(threads, 1)), 1, blocks);
    std::atomic<size_t> next = 0;
    parallel(tasks, [&](size_t) {
        for (size_t block = next++; block < blocks; block = next++) run(block);
    });
}

}  // namespace detail

// Where a block of a batch begins, as an entry and as a column.
struct BlockStart {
    size_t entry, column;
};

// Cuts a batch into blocks of about equally many entries, at the starts of columns. The last start
// is the end of the batch.
inline std::vector<BlockStart> block_starts(const Place* places, size_t entries, size_t height) {
    const size_t blocks = detail::block_count(entries, height);
    std::vector<BlockStart> starts;
    size_t entry = 0, column = 0;
    for (size_t block = 0; block <= blocks; ++block) {
        const size_t wanted = split_point(entries, block, blocks);
        for (; entry < entries && (entry < wanted || !places[entry].first()); ++entry) {
            column += places[entry].first();
        }
        starts.push_back({entry, column});
    }
    return starts;
}

// A batch by columns, in blocks.
template <class Column, class Value>
struct BatchView {
    const Column* columns;
    const Place* places;
    const Value* values;
    std::span<const BlockStart> starts;
    size_t height;

    size_t blocks() const { return starts.size() - 1; }
    size_t count() const { return starts.back().column; }
};

// Coordinates of models of one class, whose numbers are side by side for vector instructions. All
// lanes are computed, whether they are used or not.
template <class Value, class Rule>
struct Lanes {
    static constexpr size_t kCount = 64;
    Value values[kCount] = {}, squares[kCount] = {}, since[kCount] = {};

    Coordinate<Value> at(size_t lane) const { return {values[lane], squares[lane], since[lane]}; }
    void put(size_t lane, const Coordinate<Value>& coordinate) {
        values[lane] = coordinate.value;
        if constexpr (Rule::kAdaptive) squares[lane] = coordinate.squares;
        if constexpr (Rule::kSettles) since[lane] = coordinate.since;
    }
};

// Whether with_width() found the width to be 1.
template <class Width>
constexpr bool kOne = !std::is_same_v<Width, size_t>;

// Writes the coordinates at some columns, [count][width], with all regularisation applied.
template <class Column, class Value, class Rule>
void read_coordinates(const Column* columns, size_t count, const ModelRows<Value>& model,
                      const Rule& rule, auto width, int threads, Value* out) {
    using Some = Lanes<Value, Rule>;
    const size_t blocks = std::max<size_t>(count / detail::kBlockEntries, 1);
    detail::in_blocks(blocks, threads, [&](size_t block) {
        const size_t end = split_point(count, block + 1, blocks);
        size_t i = split_point(count, block, blocks);
        if constexpr (kOne<decltype(width)>) {
            for (Some lanes; i + Some::kCount <= end; i += Some::kCount) {
                for (size_t lane = 0; lane < Some::kCount; ++lane) {
                    const size_t ahead = std::min(i + lane + Some::kCount, end - 1);
                    model.fetch(size_t(columns[ahead]));
                    const Value* const row = model.row(size_t(columns[i + lane]));
                    lanes.put(lane, load<Rule>(row, 0, width));
                }
                for (size_t lane = 0; lane < Some::kCount; ++lane) {
                    out[i + lane] = rule.read(lanes.at(lane));
                }
            }
        }
        for (; i < end; ++i) {
            if (i + detail::kAhead < end) model.fetch(size_t(columns[i + detail::kAhead]));
            const Value* const row = model.row(size_t(columns[i]));
            for (size_t k = 0; k < width; ++k) {
                out[i * width + k] = rule.read(load<Rule>(row, k, width));
            }
        }
    });
}

// Writes the margins of a batch's rows, [blocks][height][width], each block's share of them, from
// the coordinates at the batch's columns.
template <class Column, class Value>
void add_margins(const BatchView<Column, Value>& batch, const Value* coordinates, auto width,
                 int threads, Value* margins) {
    detail::in_blocks(batch.blocks(), threads, [&](size_t block) {
        Value* const sums = margins + block * batch.height * width;
        std::fill_n(sums, batch.height * width, Value(0));
        const Value* weight = coordinates + batch.starts[block].column * width - width;
        const Place* const places = batch.places;
        const Value* const values = batch.values;
        const size_t last = batch.starts[block + 1].entry;
        for (size_t at = batch.starts[block].entry; at < last; ++at) {
            weight += places[at].first() * width;
            Value* const sum = sums + places[at].row() * width;
            for (size_t k = 0; k < width; ++k) sum[k] += weight[k] * values[at];
        }
    });
}

// What a batch is fitted to. With one class, targets are 1 and -1 or any numbers; with several,
// they are numbers of classes, each of which is told from all others.
template <class Value>
struct Targets {
    const Value* targets;  // [height]
    const Value* weights;  // [height], or null where all rows count 1

    double target(size_t row, size_t k, size_t width) const {
        if (width == 1) return double(targets[row]);
        return double(targets[row]) == double(k) ? 1 : -1;
    }
    double weight(size_t row) const { return weights ? double(weights[row]) : 1; }
};

// Sums the blocks' margins, and turns them into each row's derivative of the loss. Adds to
// totals[k] the sum of the losses and to totals[width + k] that of the derivatives.
template <class L, class Value>
void differentiate(L, const Value* margins, size_t blocks, size_t height, size_t width,
                   const double* intercept, const Targets<Value>& targets, int threads,
                   Value* derivatives, double* totals) {
    const size_t groups = (height + detail::kBlockRows - 1) / detail::kBlockRows;
    Buffer<double> sums(groups * 2 * width);
    detail::in_blocks(groups, threads, [&](size_t group) {
        double* sum = sums.data() + group * 2 * width;
        std::fill_n(sum, 2 * width, 0.0);
        const size_t end = std::min((group + 1) * detail::kBlockRows, height);
        for (size_t row = group * detail::kBlockRows; row < end; ++row) {
            for (size_t k = 0; k < width; ++k) {
                double margin = intercept[k];
                for (size_t b = 0; b < blocks; ++b)
                    margin += double(margins[(b * height + row) * width + k]);
                const Loss loss = L::at(margin, targets.target(row, k, width));
                const double weight = targets.weight(row);
                derivatives[row * width + k] = Value(weight * loss.derivative);
                sum[k] += weight * loss.value;
                sum[width + k] += weight * loss.derivative;
            }
        }
    });
    for (size_t group = 0; group < groups; ++group) {
        for (size_t k = 0; k < 2 * width; ++k) totals[k] += sums[group * 2 * width + k];
    }
}

// Writes the gradient of each column that occurs, [count][width], from the rows' derivatives.
template <class Column, class Value>
void gradient(const BatchView<Column, Value>& batch, const Value* derivatives, auto width,
              int threads, Value* gradient) {
    detail::in_blocks(batch.blocks(), threads, [&](size_t block) {
        const auto [entry, column] = batch.starts[block];
        const auto [last_entry, last_column] = batch.starts[block + 1];
        const Place* const places = batch.places;
        const Value* const values = batch.values;
        const bool is_long = last_entry - entry > detail::kLongColumn * (last_column - column);
        if (kOne<decltype(width)> && is_long) {
            // The sum stays in a register, for additions in memory would wait for one another. The
            // end of a short column would be mispredicted too often.
            Value* out = gradient + column;
            for (size_t at = entry; at < last_entry; ++out) {
                Value sum = 0;
                do {
                    sum += derivatives[places[at].row()] * values[at];
                } while (++at < last_entry && !places[at].first());
                *out = sum;
            }
            return;
        }
        Value* sums = gradient + column * width - width;
        std::fill_n(gradient + column * width, (last_column - column) * width, Value(0));
        for (size_t at = entry; at < last_entry; ++at) {
            sums += places[at].first() * width;
            const Value* const derivative = derivatives + places[at].row() * width;
            for (size_t k = 0; k < width; ++k) sums[k] += derivative[k] * values[at];
        }
    });
}

// What a step does to coordinates: against factor · gradient, divided by AdaGrad's root, and with
// the regularisation that they owe. With `sums`, adds to it `weight` times what the step changed,
// and what `passed` since the step before, for the average of all steps' models.
template <class Value, class Rule>
struct Step {
    using Number = Value;

    const ModelRows<Value>& model;
    const Rule& rule;
    double factor, rate;
    Value* sums;
    double weight;

    // Changes a coordinate; returns by how much the step did.
    Value change(Coordinate<Value>& coordinate, Value gradient) const {
        const Value before = coordinate.value = rule.settled(coordinate);
        rule.step(coordinate, Value(factor) * gradient, rate);
        return coordinate.value - before;
    }
    void count(size_t at, Value by) const {
        if (sums) sums[at] += Value(weight * double(by));
    }
    void pass(size_t at, const Coordinate<Value>& coordinate) const {
        if constexpr (Rule::kAdaptive && Rule::kSettles) {
            if (sums) sums[at] += Value(rule.passed(coordinate, rate));
        }
    }
};

// Takes the steps of coordinates that are added, some at a time. Coordinates without a gradient are
// left alone.
template <class Value, class Rule>
class Steps {
  public:
    explicit Steps(const Step<Value, Rule>& step) : step_(step) {}
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;
    ~Steps() { flush(); }

    void add(size_t at, const Value* gradient, auto width) {
        if constexpr (kOne<decltype(width)>) {
            step_.model.fetch(at);
            places_[count_] = at;
            gradients_[count_] = *gradient;
            count_ += *gradient != 0;  // a branch would often be mispredicted
            if (count_ == Some::kCount) flush();
        } else {
            if (std::all_of(gradient, gradient + width, [](Value g) { return g == 0; })) return;
            Value* const row = step_.model.row(at);
            for (size_t k = 0; k < width; ++k) {
                auto coordinate = load<Rule>(row, k, width);
                step_.pass(at * width + k, coordinate);
                step_.count(at * width + k, step_.change(coordinate, gradient[k]));
                store<Rule>(coordinate, row, k, width);
            }
            mark(step_.rule, row, width);
        }
    }

  private:
    using Some = Lanes<Value, Rule>;

    void flush() {
        for (size_t lane = 0; lane < count_; ++lane) {
            lanes_.put(lane, load<Rule>(step_.model.row(places_[lane]), 0, 1));
            step_.pass(places_[lane], lanes_.at(lane));
        }
        for (size_t lane = 0; lane < Some::kCount; ++lane) {
            Coordinate<Value> coordinate = lanes_.at(lane);
            changes_[lane] = step_.change(coordinate, gradients_[lane]);
            lanes_.put(lane, coordinate);
        }
        for (size_t lane = 0; lane < count_; ++lane) {
            Value* const row = step_.model.row(places_[lane]);
            store<Rule>(lanes_.at(lane), row, 0, 1);
            mark(step_.rule, row, 1);
            step_.count(places_[lane], changes_[lane]);
        }
        count_ = 0;
    }

    const Step<Value, Rule>& step_;
    Some lanes_;
    size_t count_ = 0, places_[Some::kCount];
    Value gradients_[Some::kCount] = {}, changes_[Some::kCount];
};

// Takes a step against a gradient: values[i] at columns[i], or at i if columns is null.
template <class Column, class Value, class Rule>
void take_step(const Column* columns, const Value* values, size_t count,
               const Step<Value, Rule>& step, auto width, int threads) {
    const size_t blocks = std::max<size_t>(count / detail::kBlockEntries, 1);
    detail::in_blocks(blocks, threads, [&](size_t block) {
        Steps<Value, Rule> steps(step);
        const size_t end = split_point(count, block + 1, blocks);
        for (size_t i = split_point(count, block, blocks); i < end; ++i) {
            if (columns && i + detail::kAhead < end) step.model.fetch(columns[i + detail::kAhead]);
            steps.add(columns ? size_t(columns[i]) : i, values + i * width, width);
        }
    });
}

// Several gradients, one after another. Gradient g has columns[bounds[g]] to columns[bounds[g +
// 1]], increasing, and as many rows of values; `tail` rows, which are no gradient's, follow these.
template <class Column, class Value>
struct Gradients {
    const Column* columns;
    const Value* values;
    std::span<const size_t> bounds;
    size_t tail;

    size_t count() const { return bounds.size() - 1; }

    // Calls run(its column, its row of values) for each entry of one gradient in [first, last).
    template <class Run>
    void in_range(size_t gradient, size_t first, size_t last, size_t width, const Run& run) const {
        const Column* const end = columns + bounds[gradient + 1];
        const Column* at = std::lower_bound(columns + bounds[gradient], end, Column(first));
        const Value* row = values + (size_t(at - columns) + gradient * tail) * width;
        for (; at < end && size_t(*at) < last; ++at, row += width) run(at, row);
    }
};

// Takes a step against the sum of gradients, added up in their order. `total`, which is as long as
// the model, must be zero, and is zero again afterwards.
template <class Column, class Value, class Rule>
void take_step_of_sum(const Gradients<Column, Value>& gradients, size_t dimensions,
                      const Step<Value, Rule>& step, auto width, int threads, Value* total) {
    const size_t entries = gradients.bounds.back();
    const size_t blocks = std::max<size_t>(entries / detail::kSumEntries, 1);
    detail::in_blocks(blocks, threads, [&](size_t block) {
        Steps<Value, Rule> steps(step);
        const size_t first = split_point(dimensions, block, blocks);
        const size_t last = split_point(dimensions, block + 1, blocks);
        for (size_t g = 0; g < gradients.count(); ++g) {
            gradients.in_range(g, first, last, width, [&](const Column* at, const Value* row) {
                Value* const sum = total + size_t(*at) * width;
                for (size_t k = 0; k < width; ++k) sum[k] += row[k];
            });
        }
        // A column that several gradients have is zero when it is met again.
        for (size_t g = 0; g < gradients.count(); ++g) {
            gradients.in_range(g, first, last, width, [&](const Column* at, const Value*) {
                Value* const sum = total + size_t(*at) * width;
                steps.add(size_t(*at), sum, width);
                std::fill_n(sum, size_t(width), Value(0));
            });
        }
    });
}

// Calls run(width), with a constant where it is 1.
template <class Run>
void with_width(size_t width, const Run& run) {
    width == 1 ? run(std::integral_constant<size_t, 1>()) : run(width);
}

}  // namespace sparcel
