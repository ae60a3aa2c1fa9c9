// Reduction of two sorted streams to one, in step.
//
// Which stream has the next index is unpredictable, so no branch depends on it: the results of
// comparisons advance both cursors and select the source of the copy. Each step depends on the one
// before, so several ranges of indices, the lanes, are merged in turn.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "base/numbers.hpp"
#include "streams/merge_windows.hpp"

namespace sparcel {
namespace detail {

constexpr size_t kLanes = 2;

// Streams of at least this many entries are divided into lanes.
constexpr size_t kLongEnough = 1 << 10;

// Steps between reductions of matches; after so few the values are still in the cache.
constexpr size_t kSteps = 128;

// `Width` is size_t, or a constant of it.
template <class Op, class Index, class Value, class Width>
class PairMerger {
  public:
    using View = StreamView<Index, Value>;

    PairMerger(const View& a, const View& b, Width width) : a_(a), b_(b), width_(width) {}

    Merged<Index, Value> run() {
        const size_t entries = a_.count + b_.count;
        result_.indices.resize(entries);
        result_.values.resize(entries * width_);
        indices_ = result_.indices.data();
        values_ = result_.values.data();
        const size_t lanes = std::min(a_.count, b_.count) < kLongEnough ? 1 : kLanes;
        Lane lane[kLanes];
        for (size_t l = 0, i = 0, j = 0; l < lanes; ++l) {
            const size_t i_end = a_.count * (l + 1) / lanes;
            const size_t j_end = l + 1 == lanes ? b_.count : below(b_, a_.indices[i_end]);
            lane[l].begin(i, i_end, j, j_end);
            i = i_end;
            j = j_end;
        }
        if (lanes == kLanes) advance<kLanes>(lane);
        for (size_t l = 0; l < lanes; ++l) finish(lane[l]);
        return std::move(result_);
    }

  private:
    // An index that both streams hold: its slot in the result, and its position in the second.
    struct Match {
        size_t slot, second;
    };

    // A range of both streams. The part of the result merged so far is [start, out).
    struct Lane {
        size_t i, i_end, j, j_end, start, out;
        Match matches[kSteps];

        void begin(size_t i_, size_t i_end_, size_t j_, size_t j_end_) {
            i = i_, i_end = i_end_, j = j_, j_end = j_end_;
            start = out = i + j;
        }
    };

    static size_t below(const View& stream, Index bound) {
        const Index* end = stream.indices + stream.count;
        return size_t(std::lower_bound(stream.indices, end, bound) - stream.indices);
    }

    // Merges in all lanes until one lane reaches the end of a stream.
    template <size_t kCount>
    void advance(Lane* lanes) {
        while (true) {
            size_t steps = kSteps;
            for (size_t l = 0; l < kCount; ++l) {
                steps = std::min({steps, lanes[l].i_end - lanes[l].i, lanes[l].j_end - lanes[l].j});
            }
            if (steps == 0) return;
            // Local copies, so that the compiler can keep them in registers.
            size_t i[kCount], j[kCount], out[kCount], matched[kCount];
            for (size_t l = 0; l < kCount; ++l) {
                i[l] = lanes[l].i, j[l] = lanes[l].j, out[l] = lanes[l].out, matched[l] = 0;
            }
            for (size_t step = 0; step < steps; ++step) {
#pragma GCC unroll 8
                for (size_t l = 0; l < kCount; ++l) {
                    take(i[l], j[l], out[l], matched[l], lanes[l].matches);
                }
            }
            for (size_t l = 0; l < kCount; ++l) {
                lanes[l].i = i[l], lanes[l].j = j[l], lanes[l].out = out[l];
                reduce(lanes[l].matches, matched[l]);
            }
        }
    }

    // Writes the next index. For a match, copies the first stream's row; `Op` is applied later, and
    // only to matches.
    void take(size_t& i, size_t& j, size_t& out, size_t& matched, Match* matches) {
        const Index x = a_.indices[i], y = b_.indices[j];
        const bool take_a = x <= y, take_b = y <= x;
        const Value* rows[] = {b_.values + j * width_, a_.values + i * width_};
        indices_[out] = std::min(x, y);
        std::copy_n(rows[take_a], size_t(width_), values_ + out * width_);
        matches[matched] = {out, j};
        matched += take_a && take_b;
        i += take_a;
        j += take_b;
        ++out;
    }

    void reduce(const Match* matches, size_t matched) {
        for (const Match& match : std::span(matches, matched)) {
            Value* first = row(match.slot);
            const Value* second = b_.values + match.second * width_;
            for (size_t w = 0; w < width_; ++w) {
                first[w] = narrow<Value>(Op::apply(widen(first[w]), widen(second[w])));
            }
        }
    }

    // Merges the rest of a lane, and moves its result up to the end of the lane before, which
    // matches made shorter.
    void finish(Lane& lane) {
        advance<1>(&lane);
        append(indices_ + lane.start, row(lane.start), lane.out - lane.start);
        append(a_.indices + lane.i, a_.values + lane.i * width_, lane.i_end - lane.i);
        append(b_.indices + lane.j, b_.values + lane.j * width_, lane.j_end - lane.j);
    }

    void append(const Index* indices, const Value* values, size_t count) {
        if (indices != indices_ + result_.count) {
            std::copy_n(indices, count, indices_ + result_.count);
            std::copy_n(values, count * width_, row(result_.count));
        }
        result_.count += count;
    }

    Value* row(size_t slot) { return values_ + slot * width_; }

    const View a_, b_;
    const Width width_;
    Merged<Index, Value> result_;
    Index* indices_ = nullptr;
    Value* values_ = nullptr;
};

}  // namespace detail

// Reduces two streams, each sorted and without duplicates; `Op` gets the first's value first.
template <class Op, class Index, class Value>
Merged<Index, Value> merge_pair(const StreamView<Index, Value>& a,
                                const StreamView<Index, Value>& b, size_t width) {
    using One = std::integral_constant<size_t, 1>;
    if (width == 1) return detail::PairMerger<Op, Index, Value, One>(a, b, {}).run();
    return detail::PairMerger<Op, Index, Value, size_t>(a, b, width).run();
}

}  // namespace sparcel
