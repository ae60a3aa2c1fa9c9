// Between which of many thresholds the (k+1)-th largest magnitude lies, by counting alone; and what
// the thresholds are made of, the mean and the largest magnitude.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/numbers.hpp"
#include "base/parallel.hpp"
#include "simd/bits.hpp"
#include "simd/kernels.hpp"
#include "streams/squares.hpp"
#include "streams/survivors.hpp"

namespace sparcel {

struct MagnitudeEnds {
    double mean, peak;
};

namespace detail {

template <class T>
double sum_of_magnitudes(const T* x, size_t n) {
    if constexpr (std::is_same_v<T, float>) {
        const double sum = kernels().masked.magnitude(x, n);  // faster, but it may overflow
        if (std::isfinite(sum)) return sum;
    }
    return sum_of_block(x, n, [](double value) { return std::abs(value); });
}

template <class Storage, class T>
double largest_of_block(const T* x, size_t n) {
    const auto* bits = reinterpret_cast<const Storage*>(x);
    Storage most = 0;
    for (size_t i = 0; i < n; ++i) {
        most = std::max<Storage>(most, load_bits(bits + i) & Bits<Storage>::magnitude);
    }
    return double(widen(std::bit_cast<T>(most)));
}

// Finds the last of ascending limits that a magnitude reaches, or the first. A table by leading
// bits tells where to begin, which mostly is the place.
template <class Key>
class Limits {
  public:
    // There are at least two limits; `beyond` is larger than any magnitude.
    Limits(std::vector<Key> limits, Key beyond) : limits_(std::move(limits)) {
        // Thresholds made of NaN may be out of order.
        for (size_t i = 1; i < limits_.size(); ++i) {
            limits_[i] = std::max(limits_[i], limits_[i - 1]);
        }
        first_ = limits_[1];
        // The last one may be infinite. With it in the table, many limits would share a slot.
        const Key range = limits_[std::max<size_t>(limits_.size() - 2, 1)] - first_;
        limits_.push_back(beyond);
        shift_ = std::max(0, int(std::bit_width(range)) - kTableBits);
        begin_.resize(size_t(range >> shift_) + 1);
        size_t place = 1;
        for (size_t slot = 0; slot < begin_.size(); ++slot) {
            while (limits_[place + 1] <= first_ + (Key(slot) << shift_)) ++place;
            begin_[slot] = uint32_t(place);
        }
    }

    size_t size() const { return limits_.size() - 1; }
    Key operator[](size_t place) const { return limits_[place]; }

    size_t last_reached(Key magnitude) const {
        if (magnitude < first_) return 0;
        size_t place = begin_[std::min(size_t((magnitude - first_) >> shift_), begin_.size() - 1)];
        place += limits_[place + 1] <= magnitude;  // a branch would often be predicted wrongly
        while (limits_[place + 1] <= magnitude) ++place;
        return place;
    }

  private:
    static constexpr int kTableBits = 12;

    std::vector<Key> limits_;
    std::vector<uint32_t> begin_;
    Key first_;
    int shift_;
};

// Counts the magnitudes by the last limit that they reach. Once more than k reach a limit, what
// does not reach it is no longer counted: so the pass is mostly a read.
template <class Storage>
void count_by_limit(const Storage* x, size_t n, const Limits<typename Bits<Storage>::Key>& limits,
                    size_t k, int64_t* counts) {
    using Key = typename Bits<Storage>::Key;
    const auto compact = kernels().readers<Storage>().compact;
    Key keys[kBlock + kSlack];
    uint32_t positions[kBlock + kSlack];
    size_t lowest = 0, reaching = 0;
    for (size_t i = 0; i < n; i += kBlock) {
        const Key threshold = std::max<Key>(limits[lowest], 1);
        const size_t found =
            compact(x + i, std::min(kBlock, n - i), 0, threshold, {keys, positions});
        for (size_t j = 0; j < found; ++j) {
            ++counts[limits.last_reached(keys[j] & Bits<Storage>::magnitude)];
        }
        reaching += found;
        while (lowest + 2 < limits.size() && reaching - size_t(counts[lowest]) > k) {
            reaching -= size_t(counts[lowest++]);
        }
    }
}

}  // namespace detail

// Blocks are summed up one after another, so the mean depends on no thread and no instruction set.
template <class Storage, class T>
MagnitudeEnds magnitude_ends(const T* x, size_t n, int threads) {
    const size_t blocks = (n + detail::kSummed - 1) / detail::kSummed;
    Buffer<MagnitudeEnds> ends(blocks);
    const size_t tasks = useful_threads(n, threads);
    parallel(tasks, [&](size_t task) {
        const size_t end = split_point(blocks, task + 1, tasks);
        for (size_t block = split_point(blocks, task, tasks); block < end; ++block) {
            const size_t at = block * detail::kSummed;
            const size_t length = std::min(detail::kSummed, n - at);
            ends[block] = {detail::sum_of_magnitudes(x + at, length),
                           detail::largest_of_block<Storage>(x + at, length)};
        }
    });
    MagnitudeEnds all{0, 0};
    for (size_t block = 0; block < blocks; ++block) {
        all.mean += ends[block].mean;
        all.peak = std::max(all.peak, ends[block].peak);
    }
    all.mean /= double(n);
    if (all.mean > all.peak) all.mean = all.peak;
    return all;
}

// Returns the last place, but for the very last, whose limit more than k magnitudes reach, else 0;
// how many reach it; and how many reach the next one. Zeros reach nothing.
template <class Storage>
std::array<int64_t, 3> bracket(const Storage* x, size_t n,
                               const detail::Limits<typename Bits<Storage>::Key>& limits, size_t k,
                               int threads) {
    std::vector<std::vector<int64_t>> parts(useful_threads(n, threads));
    parallel(parts.size(), [&](size_t part) {
        parts[part].assign(limits.size(), 0);
        const size_t begin = split_point(n, part, parts.size());
        const size_t end = split_point(n, part + 1, parts.size());
        detail::count_by_limit(x + begin, end - begin, limits, k, parts[part].data());
    });
    // A part leaves out only what no longer matters: counts below the place are too small.
    int64_t above = 0;
    for (const auto& part : parts) above += part.back();
    for (size_t place = limits.size() - 2;; --place) {
        int64_t reached = above;
        for (const auto& part : parts) reached += part[place];
        if (size_t(reached) > k || place == 0) return {int64_t(place), reached, above};
        above = reached;
    }
}

}  // namespace sparcel
