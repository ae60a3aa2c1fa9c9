#include "passes.hpp"
#include "quantize_pass.hpp"
#include "vectors_portable.hpp"

namespace sparcel {

const Kernels portable_kernels = {
    "portable",
    Passes<Vector16>::compact,
    Passes<Vector32>::compact,
    Passes<Vector64>::compact,
    FloatPasses<Vector32>::accumulate,
    FloatPasses<Vector64>::accumulate,
    quantize_bucket,
};

}  // namespace sparcel
