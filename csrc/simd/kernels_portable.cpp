#include "simd/all_passes.hpp"
#include "simd/sixty4_portable.hpp"
#include "simd/vectors_portable.hpp"

namespace sparcel {

constinit const Kernels portable_kernels =
    kernels_named<Vector16, Vector32, Vector64, Sixty4>("portable");

}  // namespace sparcel
