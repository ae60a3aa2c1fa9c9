// Messages of regions, checked, and their values, decoded piece by piece.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "base/buffer.hpp"
#include "base/numbers.hpp"
#include "simd/kernels.hpp"
#include "streams/message.hpp"
#include "streams/pack.hpp"
#include "streams/region_layout.hpp"

namespace sparcel {

// A message of a region, checked.
struct Packed {
    size_t count = 0, length = 0;
    bool dense = false, finite = true;
    const uint8_t* scales = nullptr;
    const uint8_t* codes = nullptr;
    Buffer<uint64_t> mask = {};  // null without has_mask()

    bool has_mask() const { return !dense && count; }
};

// Reads a message of a region of `length` coordinates whose header begins as `expected` does;
// returns nothing for any other, of which the decoder of `sparcel.formats` says what is wrong.
inline std::optional<Packed> read_packed(const uint8_t* bytes, size_t size, const Header& expected,
                                         const Coding& coding) {
    Header header;
    if (size < sizeof header) return {};
    std::memcpy(&header, bytes, sizeof header);
    Packed packed{.count = header.nnz, .length = header.size};
    packed.dense = expected.flags & kDense;
    packed.finite = !(header.flags & kNonFinite);
    Header like = header;
    like.flags = uint8_t(header.flags & ~kNonFinite);
    like.nnz = like.length = 0;
    if (std::memcmp(&like, &expected, sizeof like) != 0 || header.nnz > header.size ||
        (packed.dense && header.nnz != header.size)) {
        return {};
    }
    const uint64_t scales = padded(2 * coding.scales_of(header.nnz));
    const uint64_t codes = padded(coding.code_bytes(header.nnz));
    const Packing packing(packed.dense ? 0 : header.nnz, header.size);
    if (header.length != sizeof header + scales + codes + 8 * packing.words ||
        header.length > size) {
        return {};
    }
    packed.scales = bytes + sizeof header;
    packed.codes = packed.scales + scales;
    if (!packing.words) return packed;
    Buffer<uint64_t> words(packing.words);
    std::memcpy(words.data(), packed.codes + codes, 8 * packing.words);
    if (packing.plain) {
        size_t found = 0;
        for (size_t i = 0; i < packing.words; ++i) found += size_t(std::popcount(words[i]));
        const size_t last = header.size % 64;
        if (found != header.nnz || (last && words[packing.words - 1] >> last)) return {};
        packed.mask = std::move(words);
        return packed;
    }
    Buffer<int32_t> indices(header.nnz + kUnpackSlack);
    if (!unpack_indices(packing, words.data(), indices.data()) ||
        check_indices(indices.data(), header.nnz, int64_t(header.size)) >= 0) {
        return {};
    }
    Packing plain(header.size, header.size);
    plain.count = header.nnz;
    packed.mask = Buffer<uint64_t>(plain.words);
    pack_bitmap(plain, indices.data(), packed.mask.data());
    return packed;
}

// Decodes the values of a message piece by piece.
class Values {
  public:
    Values(const Packed& packed, const Coding& coding, size_t first_word = 0)
        : packed_(packed), coding_(coding), passes_(kernels()) {
        size_t before = packed.dense ? 64 * first_word : 0;
        for (size_t i = 0; i < first_word && packed.has_mask(); ++i) {
            before += size_t(std::popcount(packed.mask[i]));
        }
        decoded_ = before / coding.group * coding.group;
        const size_t skipped = before - decoded_;
        if (skipped) next(skipped);
    }

    // Returns the next `count` values, with room for kSlack more.
    const float* next(size_t count) {
        if (used_) std::copy_n(values_ + used_, held_, values_);
        used_ = 0;
        while (held_ < count) {
            const size_t wanted = (count - held_ + coding_.group - 1) / coding_.group;
            decode(std::min(wanted * coding_.group, packed_.count - decoded_));
        }
        used_ = count;
        held_ -= count;
        return values_;
    }

  private:
    void decode(size_t n) {
        alignas(64) uint8_t codes[kMostPiece + 2 * kMostResidual + 8];
        float scales[2 * (kMostPiece / 8 + kMostResidual)];
        const size_t first = decoded_ / coding_.group * coding_.scales();
        for (size_t i = 0; i < coding_.scales_of(n); ++i) {
            Brain scale;
            std::memcpy(&scale, packed_.scales + 2 * (first + i), sizeof scale);
            scales[i] = widen(scale);
        }
        passes_.codes.unpack(coding_.bits, packed_.codes + coding_.code_bytes(decoded_), n, codes);
        passes_.codes.dequantize(coding_, codes, n, scales, values_ + held_);
        held_ += n;
        decoded_ += n;
    }

    const Packed& packed_;
    const Coding coding_;
    const Kernels& passes_;
    size_t decoded_ = 0;          // values of the message
    size_t used_ = 0, held_ = 0;  // values here that were returned, and those that were not
    alignas(64) float values_[kMostPiece + 2 * kMostResidual + kSlack] = {};
};

// Calls run(values, mask, count) with the values of a piece of a region, and which of its
// coordinates these are; null for all.
template <class Run>
void with_piece(const Packed& packed, Values& values, size_t n, size_t place, const Run& run) {
    if (packed.dense) return run(values.next(n), nullptr, n);
    if (packed.count == 0) return;
    const uint64_t* const mask = packed.mask.data() + place / 64;
    size_t count = 0;
    for (size_t i = 0; i < (n + 63) / 64; ++i) count += size_t(std::popcount(mask[i]));
    run(values.next(count), mask, count);
}

}  // namespace sparcel
