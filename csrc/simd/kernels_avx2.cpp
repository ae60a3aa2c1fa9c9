#include "passes.hpp"
#include "quantize_pass.hpp"
#include "vectors_avx2.hpp"

namespace sparcel {

const Kernels avx2_kernels = {
    "avx2",
    Passes<Vector16>::compact,
    Passes<Vector32>::compact,
    Passes<Vector64>::compact,
    FloatPasses<Vector32>::accumulate,
    FloatPasses<Vector64>::accumulate,
    quantize_bucket,
};

}  // namespace sparcel
