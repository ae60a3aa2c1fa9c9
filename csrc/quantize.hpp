// QSGD over a whole vector: buckets to codes, codes to bytes, and back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "buffer.hpp"
#include "numbers.hpp"
#include "parallel.hpp"
#include "simd/kernels.hpp"

namespace sparcel {

struct Quantizer {
    int bits;
    size_t bucket;

    size_t per_byte() const { return size_t(8 / bits); }
    size_t packed_bytes(size_t n) const { return (n + per_byte() - 1) / per_byte(); }
    size_t buckets(size_t n) const { return (n + bucket - 1) / bucket; }

    // Four buckets of any length fill whole bytes.
    static constexpr size_t group = 4;

    template <class Value>
    void quantize(const Value* x, size_t n, uint64_t seed, uint64_t offset, int threads,
                  uint8_t* packed, float* scales) const {
        over_groups(n, threads,
                    [&](size_t begin, size_t end, Buffer<uint8_t>& codes, Buffer<float>& values) {
                        for (size_t at = begin; at < end; at += bucket) {
                            const size_t length = std::min(bucket, end - at);
                            for (size_t i = 0; i < length; ++i) values[i] = float(widen(x[at + i]));
                            scales[at / bucket] =
                                kernels().quantize_bucket(values.data(), length, bits, seed,
                                                          offset + at, codes.data() + (at - begin));
                        }
                        pack(codes.data(), end - begin, packed + begin / per_byte());
                    });
    }

    void dequantize(const uint8_t* packed, const float* scales, size_t n, int threads,
                    float* values) const {
        // The value of each code before scaling.
        float table[256];
        const int levels = (1 << (bits - 1)) - 1;
        for (int code = 0; code < 1 << bits; ++code) {
            const float magnitude = float(code & levels) / float(levels);
            table[code] = code > levels ? -magnitude : magnitude;
        }
        over_groups(n, threads,
                    [&](size_t begin, size_t end, Buffer<uint8_t>& codes, Buffer<float>&) {
                        unpack(packed + begin / per_byte(), end - begin, codes.data());
                        for (size_t i = begin; i < end; ++i) values[i] = table[codes[i - begin]];
                        for (size_t at = begin; at < end; at += bucket) {
                            const float scale = scales[at / bucket];
                            const size_t last = std::min(end, at + bucket);
                            for (size_t i = at; i < last; ++i) values[i] *= scale;
                        }
                    });
    }

  private:
    template <class Run>
    void over_groups(size_t n, int threads, const Run& run) const {
        const size_t entries = group * bucket;
        const size_t groups = (n + entries - 1) / entries;
        const size_t tasks = std::min(useful_threads(n, threads), std::max<size_t>(groups, 1));
        parallel(tasks, [&](size_t task) {
            Buffer<uint8_t> codes(std::min(entries, n) + 8);
            Buffer<float> values(std::min(bucket, n));
            for (size_t g = split_point(groups, task, tasks);
                 g < split_point(groups, task + 1, tasks); ++g) {
                run(g * entries, std::min(n, (g + 1) * entries), codes, values);
            }
        });
    }

    // The first code of a byte takes its lowest bits. Codes past the end are zero; the buffer has
    // room for them.
    void pack(uint8_t* codes, size_t n, uint8_t* packed) const {
        for (size_t i = n; i % per_byte() != 0; ++i) codes[i] = 0;
        const uint8_t* c = codes;
        for (size_t byte = 0; byte < packed_bytes(n); ++byte, c += per_byte()) {
            if (bits == 8) packed[byte] = c[0];
            if (bits == 4) packed[byte] = uint8_t(c[0] | c[1] << 4);
            if (bits == 2) packed[byte] = uint8_t(c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6);
        }
    }

    void unpack(const uint8_t* packed, size_t n, uint8_t* codes) const {
        const uint8_t mask = uint8_t((1 << bits) - 1);
        for (size_t byte = 0; byte < packed_bytes(n); ++byte) {
            for (size_t i = 0; i < per_byte(); ++i) {
                codes[byte * per_byte() + i] = uint8_t(packed[byte] >> (i * size_t(bits))) & mask;
            }
        }
    }
};

}  // namespace sparcel
