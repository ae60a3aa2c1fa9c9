#include "simd/all_passes.hpp"
#include "simd/sixty4_avx2.hpp"
#include "simd/vectors_avx2.hpp"

namespace sparcel {

constinit const Kernels avx2_kernels = kernels_named<Vector16, Vector32, Vector64, Sixty4>("avx2");

}  // namespace sparcel
