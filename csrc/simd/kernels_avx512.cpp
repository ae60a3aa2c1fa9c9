#include "accumulate_pass.hpp"
#include "ahead_pass.hpp"
#include "delta_pass.hpp"
#include "mask_pass.hpp"
#include "narrow_pass.hpp"
#include "passes.hpp"
#include "quantize_pass.hpp"
#include "sixty4_avx512.hpp"
#include "vectors_avx512.hpp"

namespace sparcel {

const Kernels avx512_kernels = {
    "avx512",
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
