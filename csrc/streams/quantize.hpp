// Whole vectors in few bits a value, and back.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/buffer.hpp"
#include "base/parallel.hpp"
#include "simd/kernels.hpp"

namespace sparcel {

// Runs over parts of a vector that begin at whole bytes of codes and at whole groups, and fit into
// a core's cache where groups are short. `run` gets a part's begin and end, and a byte for each of
// its codes.
template <class Run>
void over_parts(const Coding& coding, size_t n, int threads, const Run& run) {
    const size_t entries = coding.group * std::max<size_t>(8, 4096 / coding.group / 8 * 8);
    const size_t parts = (n + entries - 1) / entries;
    const size_t tasks = std::min(useful_threads(n, threads), std::max<size_t>(parts, 1));
    parallel(tasks, [&](size_t task) {
        Buffer<uint8_t> codes(std::min(entries, n) + 8);
        Buffer<double> sums(coding.two_means ? coding.group : 0);
        for (size_t part = split_point(parts, task, tasks);
             part < split_point(parts, task + 1, tasks); ++part) {
            run(part * entries, std::min(n, (part + 1) * entries), codes.data(), sums.data());
        }
    });
}

// Writes the codes, the scales and the values that they stand for.
inline void quantize(const Coding& coding, const float* x, size_t n, uint64_t offset, int threads,
                     uint8_t* packed, float* scales, float* values) {
    const CodePasses& passes = kernels().codes;
    over_parts(coding, n, threads, [&](size_t begin, size_t end, uint8_t* codes, double* sums) {
        passes.quantize(coding, x + begin, end - begin, offset + begin, sums, codes,
                        scales + begin / coding.group * coding.scales(), values + begin);
        passes.pack(coding.bits, codes, end - begin, packed + coding.code_bytes(begin));
    });
}

inline void dequantize(const Coding& coding, const uint8_t* packed, const float* scales, size_t n,
                       int threads, float* values) {
    const CodePasses& passes = kernels().codes;
    over_parts(coding, n, threads, [&](size_t begin, size_t end, uint8_t* codes, double*) {
        passes.unpack(coding.bits, packed + coding.code_bytes(begin), end - begin, codes);
        passes.dequantize(coding, codes, end - begin,
                          scales + begin / coding.group * coding.scales(), values + begin);
    });
}

}  // namespace sparcel
