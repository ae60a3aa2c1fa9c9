#include "simd/all_passes.hpp"
#include "simd/sixty4_avx512.hpp"
#include "simd/vectors_avx512.hpp"

namespace sparcel {

constinit const Kernels avx512_kernels =
    kernels_named<Vector16, Vector32, Vector64, Sixty4>("avx512");

}  // namespace sparcel
