// All passes over the vector types of one instruction set.
#pragma once

#include "simd/accumulate_pass.hpp"
#include "simd/ahead_pass.hpp"
#include "simd/delta_pass.hpp"
#include "simd/kernels.hpp"
#include "simd/mask_pass.hpp"
#include "simd/narrow_pass.hpp"
#include "simd/passes.hpp"
#include "simd/quantize_pass.hpp"

namespace sparcel {
namespace {

template <class Vector16, class Vector32, class Vector64, class Sixty4>
constexpr Kernels kernels_named(const char* name) {
    return {
        name,
        Passes<Vector16>::readers,
        Passes<Vector32>::readers,
        Passes<Vector64>::readers,
        FloatPasses<Vector32>::accumulate,
        FloatPasses<Vector64>::accumulate,
        code_passes,
        masked_passes<Vector32>,
        narrow_passes,
        delta_passes<Sixty4>,
        ahead_passes,
    };
}

}  // namespace
}  // namespace sparcel
