#include "simd/accumulate_pass.hpp"
#include "simd/ahead_pass.hpp"
#include "simd/delta_pass.hpp"
#include "simd/mask_pass.hpp"
#include "simd/narrow_pass.hpp"
#include "simd/passes.hpp"
#include "simd/quantize_pass.hpp"
#include "simd/sixty4_portable.hpp"
#include "simd/vectors_portable.hpp"

namespace sparcel {

const Kernels portable_kernels = {
    "portable",
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
