// Plain messages, read in place. `sparcel.formats` defines their layout; if this
// file refuses a message, the decoder there says what is wrong with it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "streams/merge_windows.hpp"
#include "streams/scatter.hpp"

namespace sparcel {

struct Header {
    char magic[4];
    uint8_t version, kind, dtype, flags;
    uint32_t width, detail;
    uint64_t size, nnz, length;
};
static_assert(sizeof(Header) == 40);

constexpr uint8_t kDense = 1;
constexpr uint8_t kNonFinite = 2;

// Every part of a message takes a multiple of 8 bytes.
constexpr uint64_t padded(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

// Returns the stream in a sparse message of scalars with 4-byte indices, of a vector of `size`,
// whose payload takes up all of `bytes`; returns nothing for any other message. `control` has the
// bytes of a header.
template <class Value>
std::optional<StreamView<int32_t, Value>> read_sparse(const uint8_t* control,
                                                      const uint8_t* payload, size_t bytes,
                                                      uint64_t size, uint8_t dtype, bool& finite) {
    static_assert(std::endian::native == std::endian::little);
    Header header;
    if (reinterpret_cast<uintptr_t>(payload) % 8) return {};
    std::memcpy(&header, control, sizeof header);
    const bool plain = std::memcmp(header.magic, "SPCL", 4) == 0 && header.version == 3 &&
                       header.kind == 0 && (header.flags & ~kNonFinite) == 0 && header.width == 0 &&
                       header.detail == 0;
    if (!plain || header.dtype != dtype || header.size != size || size > INT32_MAX ||
        header.nnz > size) {
        return {};
    }
    const uint64_t values = padded(header.nnz * sizeof(Value));
    const uint64_t length = values + padded(header.nnz * sizeof(int32_t));
    if (header.length != sizeof header + length || length != bytes) return {};
    const auto* indices = reinterpret_cast<const int32_t*>(payload + values);
    if (check_indices(indices, header.nnz, int64_t(size)) >= 0) return {};
    finite = finite && !(header.flags & kNonFinite);
    return {{indices, reinterpret_cast<const Value*>(payload), header.nnz}};
}

}  // namespace sparcel
