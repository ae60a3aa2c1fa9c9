// The passes over whole vectors, compiled once per instruction set and chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/bits.hpp"
#include "simd/delta.hpp"

namespace sparcel {

// Passes write whole registers: this many entries past the last survivor must be writable.
constexpr size_t kSlack = 16;

// Number of groups whose maxima a pass computes: as many as the widest registers have lanes.
constexpr size_t kGroups = 16;

// Up to this k, fewer than 2k entries are expected to reach the k-th largest group maximum.
constexpr size_t kFew = 10;

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

// Returns the position of the first entry of largest magnitude in x[0, n), n > 0.
template <class Storage>
using FirstLargest = size_t (*)(const Storage* x, size_t n);

// Puts the min(k, nnz) largest magnitudes of x[0, n), 1 <= k <= kFew, into the sink, in order, and
// returns how many. If more than kGroups entries are candidates, puts all that reach `floor` > 0
// there instead: more than k, and at most n; ties with it only as far as they may be among the k
// largest. The sink must have room for 2n entries.
template <class Storage>
using FewLargest = size_t (*)(const Storage* x, size_t n, size_t k,
                              Sink<typename Bits<Storage>::Key> sink,
                              typename Bits<Storage>::Key* floor);

// scratch = memory + addend, where addend = scale·gradient + momentum·velocity. The gradient comes
// apart, because its type may be another.
template <class Float>
struct Addition {
    const Float* memory;
    Float* scratch;
    Float scale;
    Float momentum;
    const Float* velocity;  // or null
    Float* entering;        // where the addend goes, or null
    bool stream;            // whether stores to scratch should bypass the cache

    bool corrected() const { return scale != 1 || velocity || entering; }

    Addition from(size_t i) const {
        Addition rest = *this;
        rest.memory += i;
        rest.scratch += i;
        if (velocity) rest.velocity += i;
        if (entering) rest.entering += i;
        return rest;
    }
};

// Like Compact over the sum of n entries, which it writes. Raises `largest` to the largest
// magnitude.
template <class Float, class Key>
using Accumulate = size_t (*)(const Addition<Float>& addition, const Float* gradient, size_t n,
                              uint32_t base, Key threshold, Sink<Key> sink, Key* largest);

// How values become few bits: see `sparcel.core.kernels.definitions.few_bits`.
struct Coding {
    int bits;
    size_t group;     // how many values share a scale, or two: `block` in Python
    bool two_means;   // whether a group has two scales
    bool narrow;      // whether scales are those of bfloat16
    bool stochastic;  // whether values are rounded at random, by `seed`
    uint64_t seed;

    int levels() const { return (1 << (bits - 1)) - 1; }
    size_t scales() const { return two_means ? 2 : 1; }
    // Also where the code of value n begins, if n is a multiple of 8.
    size_t code_bytes(size_t n) const { return (n * size_t(bits) + 7) / 8; }
    size_t scales_of(size_t n) const { return (n + group - 1) / group * scales(); }
};

constexpr size_t kMostResidual = 64;

// The passes over several groups; `codes` has a byte for each value, with 8 bytes of room after
// them, and `sums` has room for as many numbers as a group has. Random number i is number
// `offset + i` of the sequence.
struct CodePasses {
    void (*quantize)(const Coding& coding, const float* x, size_t n, uint64_t offset, double* sums,
                     uint8_t* codes, float* scales, float* values);
    // Rounds x to nearest, in groups of at most kMostResidual, and writes x less what it became;
    // `residual` may be x. Returns by how much the sum of the magnitudes falls.
    double (*residual)(const Coding& coding, const float* x, size_t n, double* sums, uint8_t* codes,
                       float* scales, float* residual);
    void (*dequantize)(const Coding& coding, const uint8_t* codes, size_t n, const float* scales,
                       float* values);
    void (*pack)(int bits, uint8_t* codes, size_t n, uint8_t* packed);
    void (*unpack)(int bits, const uint8_t* packed, size_t n, uint8_t* codes);
};

// Rounds x[0, n) to 16 bits, to nearest; finite numbers stay finite.
struct NarrowPasses {
    void (*half)(const float* x, size_t n, uint16_t* narrow);
    void (*brain)(const float* x, size_t n, uint16_t* narrow);
};

// The passes over 64·words numbers x of which a bitmap selects some. The selected values are in
// order; kSlack more can be read and written.
struct MaskPasses {
    // Makes x = memory + addend, unless memory is null. Selects |x| >= threshold > 0 into the
    // bitmap and the values, returns how many these are, and raises `largest` to the largest
    // magnitude.
    size_t (*select)(const float* memory, const float* addend, float* x, size_t words,
                     uint32_t threshold, uint64_t* mask, float* values, uint32_t* largest);
    // Writes the values to x; adds them to x; makes x of them and of zeros.
    void (*put)(const uint64_t* mask, size_t words, const float* values, float* x);
    void (*add)(const uint64_t* mask, size_t words, const float* values, float* x);
    void (*expand)(const uint64_t* mask, size_t words, const float* values, float* x);
    // Divides x[0, n), and returns the bits of the largest magnitude.
    uint32_t (*divide)(float* x, size_t n, float divisor);
    // Returns the sum of the magnitudes of x[0, n).
    double (*magnitude)(const float* x, size_t n);
    // Copies x[0, n), past the cache where `to` allows that. Other threads see it after a fence.
    void (*move_out)(const float* x, size_t n, float* to);
    void (*fence)();
};

// How Adam scales a gradient g: by 1 / (√((beta·v + rest·g²)·correction) + eps).
struct AdamScale {
    float beta, rest, correction, eps;
};

// The passes of step-ahead over n float32 values. `amsgrad` takes the larger of a square and
// `largest`; `adam` ignores `largest`.
struct AheadPasses {
    using Adam = void (*)(const float* values, const float* gradients, const float* squares,
                          const float* largest, size_t n, const AdamScale& scale, float rate,
                          float* moved);
    void (*along)(const float* values, const float* directions, size_t n, float rate, float* moved);
    Adam adam, amsgrad;
};

// The passes that read a vector as it is stored.
template <class Storage>
struct Readers {
    Compact<Storage> compact;
    FirstLargest<Storage> first_largest;
    FewLargest<Storage> few_largest;
};

struct Kernels {
    const char* name;
    Readers<uint16_t> of16;
    Readers<uint32_t> of32;
    Readers<uint64_t> of64;
    Accumulate<float, uint32_t> accumulate32;
    Accumulate<double, uint64_t> accumulate64;
    CodePasses codes;
    MaskPasses masked;
    NarrowPasses narrow;
    DeltaPasses delta;
    AheadPasses ahead;

    template <class Storage>
    const Readers<Storage>& readers() const {
        if constexpr (sizeof(Storage) == 2) return of16;
        if constexpr (sizeof(Storage) == 4) return of32;
        if constexpr (sizeof(Storage) == 8) return of64;
    }
};

extern const Kernels portable_kernels;
#ifdef SPARCEL_X86
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

// Returns the best set that this machine can run, or the one that set_isa chose.
const Kernels& kernels();

// Chooses a set by name and tells whether this machine can run it; nothing changes if not.
bool set_isa(const char* name);

}  // namespace sparcel
