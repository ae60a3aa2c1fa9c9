#include "simd/accumulate_pass.hpp"
#include "simd/ahead_pass.hpp"
#include "simd/delta_pass.hpp"
#include "simd/mask_pass.hpp"
#include "simd/narrow_pass.hpp"
#include "simd/passes.hpp"
#include "simd/quantize_pass.hpp"
#include "simd/sixty4_avx2.hpp"
#include "simd/vectors_avx2.hpp"

namespace sparcel {

const Kernels avx2_kernels = {
    "avx2",
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

}  // namespace sparcel
