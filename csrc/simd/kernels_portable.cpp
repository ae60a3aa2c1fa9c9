#include "accumulate_pass.hpp"
#include "ahead_pass.hpp"
#include "delta_pass.hpp"
#include "mask_pass.hpp"
#include "narrow_pass.hpp"
#include "passes.hpp"
#include "quantize_pass.hpp"
#include "sixty4_portable.hpp"
#include "vectors_portable.hpp"

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
