// From which magnitude on coordinates are selected, estimated by samples.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "simd/bits.hpp"
#include "simd/kernels.hpp"
#include "streams/region_layout.hpp"

namespace sparcel {

// How a phase selects, and in how many bits it writes. Of a dense phase all is written.
struct Selection {
    Coding coding;
    std::vector<std::pair<size_t, double>> shares;  // where a range stops, and its density
    bool dense;
    uint64_t step;  // decides which coordinates the samples take
};

// Before coordinate `stop`, and from the limit before this one on, entries of at least the
// threshold's magnitude are taken.
struct Limit {
    size_t stop;
    uint32_t threshold;  // the bits of a magnitude, not 0
};

// Returns the magnitude that about `density` of `count` numbers reach: in a sample of up to 8192,
// which every step takes elsewhere. `number(place)` is the number at a place below `count`.
template <class Number>
uint32_t sampled_threshold(size_t count, double density, uint64_t step, const Number& number) {
    const size_t taken = std::min(count, std::clamp<size_t>(count / 64, 1024, 8192));
    if (taken == 0) return 1;
    std::vector<uint32_t> sample(taken);
    for (size_t i = 0; i < taken; ++i) {
        const uint64_t spread = ((i + step * taken) & 0xffffff) * 0x9E3779B1 & 0xffffffff;
        const size_t place = taken == count ? i : size_t((spread >> 8) * count >> 24);
        sample[i] = std::bit_cast<uint32_t>(number(place)) & Bits<uint32_t>::magnitude;
    }
    const size_t k = std::clamp<size_t>(size_t(density * double(taken) + 0.5), 1, taken);
    std::nth_element(sample.begin(), sample.begin() + ptrdiff_t(k - 1), sample.end(),
                     std::greater<>());
    return std::max<uint32_t>(sample[k - 1], 1);
}

// Returns the limits of each share of a domain, none of a dense phase; `number(i)` is coordinate i.
template <class Number>
std::vector<Limit> limits_of(const Selection& selection, const Domain& domain,
                             const Number& number) {
    std::vector<Limit> limits;
    if (selection.dense) return limits;
    size_t first = 0;
    for (const auto& [stop, density] : selection.shares) {
        const size_t last = domain.before(stop);
        const auto at = [&](size_t place) { return number(domain.coordinate(first + place)); };
        limits.push_back({stop, sampled_threshold(last - first, density, selection.step, at)});
        first = last;
    }
    return limits;
}

}  // namespace sparcel
