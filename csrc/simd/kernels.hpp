// The passes over whole vectors, compiled once per instruction set and chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bits.hpp"

namespace sparcel {

// Passes write whole registers: this many entries past the last survivor must be writable.
constexpr size_t kSlack = 16;

// Where a pass puts the entries that reach its threshold: their bits and their positions.
template <class Key>
struct Sink {
    Key* keys;
    uint32_t* positions;
};

// Appends the entries of x[0, n) with |x| >= threshold > 0 to the sink and returns how many; their
// positions count from `base`.
template <class Storage>
using Compact = size_t (*)(const Storage* x, size_t n, uint32_t base,
                           typename Bits<Storage>::Key threshold,
                           Sink<typename Bits<Storage>::Key> sink);

// Like Compact over scratch = memory + gradient, which it writes; raises `largest` to the largest
// magnitude that it met. `stream` asks for stores that bypass the cache.
template <class Float, class Key>
using Accumulate = size_t (*)(const Float* memory, const Float* gradient, Float* scratch, size_t n,
                              uint32_t base, Key threshold, Sink<Key> sink, Key* largest,
                              bool stream);

// Quantises x[0, n) with one scale: codes[i] is the sign bit, then the level. Random number i is
// number `offset + i` of the sequence that `seed` names. Returns the scale.
using QuantizeBucket = float (*)(const float* x, size_t n, int bits, uint64_t seed, uint64_t offset,
                                 uint8_t* codes);

struct Kernels {
    const char* name;
    Compact<uint16_t> compact16;
    Compact<uint32_t> compact32;
    Compact<uint64_t> compact64;
    Accumulate<float, uint32_t> accumulate32;
    Accumulate<double, uint64_t> accumulate64;
    QuantizeBucket quantize_bucket;
};

extern const Kernels portable_kernels;
#ifdef SPARCEL_X86
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

// The best set that this machine runs, unless set_isa chose another.
const Kernels& kernels();

// Chooses a set by name and tells whether this machine can run it; nothing changes if not.
bool set_isa(const char* name);

}  // namespace sparcel
