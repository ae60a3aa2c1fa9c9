// MurmurHash3 with seed 0, a hash by Austin Appleby that he placed in the public domain.
//
// Both functions read the last block whole and clear the bytes behind the data, which takes no
// branch. So `kMurmurPadding` bytes behind the data must be readable.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sparcel {

constexpr size_t kMurmurPadding = 16;

namespace detail {

static_assert(std::endian::native == std::endian::little, "blocks are little-endian");

template <class Block>
Block load(const uint8_t* data) {
    Block block;
    std::memcpy(&block, data, sizeof(Block));
    return block;
}

// The first `count` bytes of a block, fewer than all, and zeros.
template <class Block>
Block first_bytes(const uint8_t* data, size_t count) {
    return load<Block>(data) & ((Block{1} << 8 * count) - 1);
}

inline uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccd;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53;
    return hash ^ hash >> 33;
}

}  // namespace detail

// The variant x86_32.
inline uint32_t murmur32(const uint8_t* data, size_t length) {
    const auto mix = [](uint32_t block) { return std::rotl(block * 0xcc9e2d51, 15) * 0x1b873593; };
    uint32_t hash = 0;
    const uint8_t* const rest = data + length / 4 * 4;
    for (; data != rest; data += 4) {
        hash = std::rotl(hash ^ mix(detail::load<uint32_t>(data)), 13) * 5 + 0xe6546b64;
    }
    hash ^= mix(detail::first_bytes<uint32_t>(rest, length % 4)) ^ uint32_t(length);
    hash = (hash ^ hash >> 16) * 0x85ebca6b;
    hash = (hash ^ hash >> 13) * 0xc2b2ae35;
    return hash ^ hash >> 16;
}

// The first 64 bits of the variant x64_128.
inline uint64_t murmur64(const uint8_t* data, size_t length) {
    constexpr uint64_t kOne = 0x87c37b91114253d5, kTwo = 0x4cf5ad432745937f;
    const auto mix_low = [](uint64_t block) { return std::rotl(block * kOne, 31) * kTwo; };
    const auto mix_high = [](uint64_t block) { return std::rotl(block * kTwo, 33) * kOne; };
    uint64_t low = 0, high = 0;
    const uint8_t* const rest = data + length / 16 * 16;
    for (; data != rest; data += 16) {
        low = (std::rotl(low ^ mix_low(detail::load<uint64_t>(data)), 27) + high) * 5 + 0x52dce729;
        high = (std::rotl(high ^ mix_high(detail::load<uint64_t>(data + 8)), 31) + low) * 5 +
               0x38495ab5;
    }
    const size_t left = length % 16;
    if (left < 8) {
        low ^= mix_low(detail::first_bytes<uint64_t>(rest, left));
    } else {
        low ^= mix_low(detail::load<uint64_t>(rest));
        high ^= mix_high(detail::first_bytes<uint64_t>(rest + 8, left - 8));
    }
    low ^= length;
    high ^= length;
    low += high;
    high += low;
    return detail::avalanche(low) + detail::avalanche(high);
}

}  // namespace sparcel
