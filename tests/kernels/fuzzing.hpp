// What programs that mutate bytes for the C++ decoders share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "simd/kernels.hpp"

namespace sparcel {
namespace {

using Bytes = std::span<uint8_t>;

std::mt19937_64 engine;

inline uint64_t below(uint64_t bound) { return engine() % bound; }
inline bool one_in(uint64_t count) { return below(count) == 0; }

inline void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::abort();
}

template <class T>
Bytes bytes_of(std::vector<T>& items) {
    return {reinterpret_cast<uint8_t*>(items.data()), items.size() * sizeof(T)};
}

// Flips bits, sets bytes, and copies bytes to other places.
inline void mutate(Bytes bytes) {
    if (bytes.empty()) return;
    for (uint64_t times = 1 + below(4); times > 0; --times) {
        const uint64_t place = below(bytes.size()), from = below(bytes.size());
        const uint64_t length = 1 + below(bytes.size() - std::max(place, from));
        switch (below(3)) {
            case 0:
                bytes[place] ^= uint8_t(1 << below(8));
                break;
            case 1:
                bytes[place] = one_in(2) ? uint8_t(0 - below(2)) : uint8_t(engine());
                break;
            default:
                std::memmove(&bytes[place], &bytes[from], length);
        }
    }
}

// Runs `read`, which tells whether mutated bytes were accepted, as often as the first argument of
// the program says, with the seed that is the second; each instruction set takes its turn.
template <class Read>
int fuzz(int argc, char** argv, const char* what, const Read& read) {
    const auto argument = [&](int place, uint64_t otherwise) {
        return argc > place ? std::strtoull(argv[place], nullptr, 10) : otherwise;
    };
    const uint64_t count = argument(1, 100'000);
    engine.seed(argument(2, 0));
    uint64_t accepted = 0;
    for (uint64_t i = 0; i < count; ++i) {
        if (i % 1024 == 0) {
            constexpr const char* kNames[] = {"portable", "avx2", "avx512"};
            set_isa(kNames[i / 1024 % 3]);
        }
        accepted += read();
    }
    std::printf("%llu mutated %s: %llu accepted, all harmless\n",
                static_cast<unsigned long long>(count), what,
                static_cast<unsigned long long>(accepted));
    return 0;
}

}  // namespace
}  // namespace sparcel
