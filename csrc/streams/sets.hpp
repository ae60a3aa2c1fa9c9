// The entries of a sorted stream whose indices another sorted list has, or lacks.
//
// Which list has the next index is unpredictable, so no branch depends on it: the results of
// comparisons advance both cursors and the end of the result. Each step depends on the one before,
// so several parts of the stream, the lanes, are filtered in turn.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "base/buffer.hpp"
#include "streams/merge_windows.hpp"

namespace sparcel {
namespace detail {

constexpr size_t kFilterLanes = 4;

// `Width` is size_t, or a constant of it. If `kPresent`, entries stay whose index `others` has.
template <bool kPresent, class Index, class Value, class Width>
class Filter {
  public:
    using View = StreamView<Index, Value>;

    Filter(const View& stream, const Index* others, size_t count, Width width)
        : stream_(stream), others_(others), count_(count), width_(width) {}

    Merged<Index, Value> run() {
        result_.indices.resize(stream_.count);
        result_.values.resize(stream_.count * width_);
        if (stream_.count == 0) return std::move(result_);
        Lane lanes[kFilterLanes];
        for (size_t l = 0, i = 0, j = 0; l < kFilterLanes; ++l) {
            const size_t i_end = stream_.count * (l + 1) / kFilterLanes;
            const size_t j_end = l + 1 == kFilterLanes ? count_ : below(stream_.indices[i_end]);
            lanes[l] = {i, i_end, j, j_end, i, i};
            i = i_end;
            j = j_end;
        }
        advance<kFilterLanes>(lanes);
        for (Lane& lane : lanes) finish(lane);
        return std::move(result_);
    }

  private:
    // A part of both lists. What it keeps is written to [start, out), and never overtakes i.
    struct Lane {
        size_t i, i_end, j, j_end, start, out;
    };

    size_t below(Index bound) const {
        return size_t(std::lower_bound(others_, others_ + count_, bound) - others_);
    }

    // Filters in all lanes until one lane reaches the end of a list.
    template <size_t kCount>
    void advance(Lane* lanes) {
        while (true) {
            size_t steps = stream_.count;
            for (size_t l = 0; l < kCount; ++l) {
                steps = std::min({steps, lanes[l].i_end - lanes[l].i, lanes[l].j_end - lanes[l].j});
            }
            if (steps == 0) return;
            // Local copies, so that the compiler can keep them in registers.
            size_t i[kCount], j[kCount], out[kCount];
            for (size_t l = 0; l < kCount; ++l) {
                i[l] = lanes[l].i, j[l] = lanes[l].j, out[l] = lanes[l].out;
            }
            for (size_t step = 0; step < steps; ++step) {
#pragma GCC unroll 8
                for (size_t l = 0; l < kCount; ++l) {
                    const Index x = stream_.indices[i[l]], y = others_[j[l]];
                    copy(i[l], out[l], 1);
                    out[l] += kPresent ? x == y : x < y;
                    i[l] += x <= y;
                    j[l] += y <= x;
                }
            }
            for (size_t l = 0; l < kCount; ++l) {
                lanes[l].i = i[l], lanes[l].j = j[l], lanes[l].out = out[l];
            }
        }
    }

    // Filters the rest of a lane, and moves what it kept to the end of the lane before.
    void finish(Lane& lane) {
        advance<1>(&lane);
        if (!kPresent) {
            copy(lane.i, lane.out, lane.i_end - lane.i);
            lane.out += lane.i_end - lane.i;
        }
        const size_t kept = lane.out - lane.start;
        Index* indices = result_.indices.data();
        Value* values = result_.values.data();
        std::copy_n(indices + lane.start, kept, indices + result_.count);
        std::copy_n(values + lane.start * width_, kept * width_, values + result_.count * width_);
        result_.count += kept;
    }

    void copy(size_t from, size_t to, size_t count) {
        std::copy_n(stream_.indices + from, count, result_.indices.data() + to);
        std::copy_n(stream_.values + from * width_, count * width_,
                    result_.values.data() + to * width_);
    }

    const View stream_;
    const Index* const others_;
    const size_t count_;
    const Width width_;
    Merged<Index, Value> result_;
};

}  // namespace detail

// Returns the entries of a stream whose indices are among the `count` others, or those whose are
// not. Both lists of indices are sorted and without duplicates.
template <bool kPresent, class Index, class Value>
Merged<Index, Value> filter(const StreamView<Index, Value>& stream, const Index* others,
                            size_t count, size_t width) {
    using One = std::integral_constant<size_t, 1>;
    if (width == 1) {
        return detail::Filter<kPresent, Index, Value, One>(stream, others, count, {}).run();
    }
    return detail::Filter<kPresent, Index, Value, size_t>(stream, others, count, width).run();
}

}  // namespace sparcel
