// Vector types of 16 bytes.
#pragma once

#include <cstdint>

#include "simd/vectors.hpp"

namespace sparcel {
namespace {

struct Vector16 : VectorLanes<Vector16, uint16_t, 16> {};
struct Vector32 : VectorLanes<Vector32, uint32_t, 16> {};
struct Vector64 : VectorLanes<Vector64, uint64_t, 16> {};

}  // namespace
}  // namespace sparcel
