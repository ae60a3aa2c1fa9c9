// Where parameters would be after steps of an optimiser, in loops that each instruction set's
// compiler vectorises. `sparcel.core.kernels.definitions.optim` says what they compute.
#pragma once

#include <cmath>
#include <cstddef>

#include "simd/kernels.hpp"

namespace sparcel {
namespace {

void move_along(const float* __restrict values, const float* __restrict directions, size_t n,
                float rate, float* __restrict moved) {
    for (size_t i = 0; i < n; ++i) moved[i] = values[i] - rate * directions[i];
}

template <bool kLargest>
void move_as_adam(const float* __restrict values, const float* __restrict gradients,
                  const float* __restrict squares, const float* __restrict largest, size_t n,
                  const AdamScale& scale, float rate, float* __restrict moved) {
    const auto [beta, rest, correction, eps] = scale;
    for (size_t i = 0; i < n; ++i) {
        const float gradient = gradients[i];
        float square = beta * squares[i] + rest * (gradient * gradient);
        if constexpr (kLargest) square = largest[i] > square ? largest[i] : square;
        moved[i] = values[i] - rate * (gradient / (std::sqrt(square * correction) + eps));
    }
}

constexpr AheadPasses ahead_passes = {move_along, move_as_adam<false>, move_as_adam<true>};

}  // namespace
}  // namespace sparcel
