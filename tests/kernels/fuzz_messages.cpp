// Decodes mutated messages, which must be refused or harmless. The sanitizers see reads out of
// bounds, because all buffers have exactly the bytes that a decoder may read.
//
//     fuzz_messages COUNT [SEED]

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "fuzzing.hpp"
#include "streams/merge.hpp"
#include "streams/message.hpp"
#include "streams/pack.hpp"
#include "streams/quantize.hpp"
#include "streams/regions.hpp"

namespace sparcel {
namespace {

// Mostly small, so that mutations of few bits matter; sometimes at the limits of the index types.
template <class Index>
uint64_t draw_size() {
    const uint64_t most = uint64_t(std::numeric_limits<Index>::max());
    return one_in(8) ? most - below(100) : 1 + below(one_in(2) ? 100 : 5000);
}

template <class Index>
std::vector<Index> draw_indices(uint64_t size) {
    std::vector<Index> indices(below(std::min<uint64_t>(size, 100) + 1));
    for (Index& index : indices) index = Index(below(size));
    std::sort(indices.begin(), indices.end());
    indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
    return indices;
}

template <class Index>
bool are_valid(const Index* indices, size_t count, uint64_t size) {
    for (size_t i = 0; i < count; ++i) {
        if (indices[i] < 0 || uint64_t(indices[i]) >= size) return false;
        if (i > 0 && indices[i] <= indices[i - 1]) return false;
    }
    return true;
}

constexpr uint8_t kFloat32 = 2;  // its code in headers

std::vector<uint64_t> plain_message(const std::vector<int32_t>& indices, uint64_t size) {
    const uint64_t part = padded(4 * indices.size());
    const Header header{{'S', 'P', 'C', 'L'},     3, 0, kFloat32, 0, 0, 0, size, indices.size(),
                        sizeof(Header) + 2 * part};
    std::vector<uint64_t> message(header.length / 8);
    const Bytes bytes = bytes_of(message);
    std::memcpy(bytes.data(), &header, sizeof header);
    if (part) std::memcpy(&bytes[sizeof header + part], indices.data(), 4 * indices.size());
    return message;
}

// Reads the message in `bytes`, which has a header at least.
std::optional<StreamView<int32_t, float>> read_message(Bytes bytes, uint64_t size) {
    bool finite = true;
    const Bytes payload = bytes.subspan(sizeof(Header));
    return read_sparse<float>(bytes.data(), payload.data(), payload.size(), size, kFloat32, finite);
}

// Reads plain messages, of which one is mutated or truncated, and merges them. Returns whether the
// mutated one was read.
bool read_plain() {
    const uint64_t size = draw_size<int32_t>();
    std::vector<uint64_t> other = plain_message(draw_indices<int32_t>(size), size);
    std::vector<uint64_t> message = plain_message(draw_indices<int32_t>(size), size);
    mutate(one_in(4) ? bytes_of(message) : bytes_of(message).subspan(sizeof(Header)));
    std::vector<uint8_t> exact(bytes_of(message).begin(), bytes_of(message).end());
    if (one_in(4)) {
        exact.resize(sizeof(Header) + below(exact.size() - sizeof(Header) + 1));
        exact.shrink_to_fit();
    }
    const auto whole = read_message(bytes_of(other), size);
    expect(whole.has_value(), "a valid message was refused");
    const auto view = read_message(exact, size);
    if (!view) return false;
    expect(are_valid(view->indices, view->count, size), "invalid indices were accepted");
    const std::vector<StreamView<int32_t, float>> views = {*whole, *view};
    const auto merged = merge<AddOp, int32_t, float>(views, 1, 1);
    expect(are_valid(merged.indices.data(), merged.count, size), "a merge has invalid indices");
    return true;
}

// Unpacks mutated indices, also with other counts than they were packed with. Returns whether they
// were accepted.
template <class Index>
bool read_packed() {
    uint64_t size = draw_size<Index>();
    const std::vector<Index> indices = draw_indices<Index>(size);
    uint64_t count = indices.size();
    std::vector<uint64_t> words(Packing(count, size).words);
    expect(pack_indices(Packing(count, size), indices.data(), words.data()), "not packed");
    std::vector<Index> found(count + kUnpackSlack);
    expect(unpack_indices(Packing(count, size), words.data(), found.data()) &&
               std::equal(indices.begin(), indices.end(), found.begin()),
           "valid indices do not come back");
    if (one_in(4)) {
        size = std::max<uint64_t>(one_in(2) ? size : draw_size<Index>(), 1);
        count = below(std::min<uint64_t>(size, 200) + 1);
        words.resize(Packing(count, size).words);
        words.shrink_to_fit();
    }
    mutate(bytes_of(words));
    found = std::vector<Index>(count + kUnpackSlack);
    if (!unpack_indices(Packing(count, size), words.data(), found.data())) return false;
    if (check_indices(found.data(), count, int64_t(size)) >= 0) return false;
    expect(are_valid(found.data(), count, size), "invalid indices were accepted");
    return true;
}

// Turns mutated codes and scales into values; any bytes stand for some.
void read_few_bits() {
    const size_t n = below(300);
    Coding coding{.bits = 2 + int(below(7)),
                  .group = 8 * (1 + below(20)),
                  .two_means = false,
                  .narrow = one_in(2),
                  .stochastic = one_in(2),
                  .seed = engine()};
    coding.two_means = coding.bits == 2 && !coding.stochastic;
    std::vector<float> x(n), scales(coding.scales_of(n)), values(n);
    for (float& each : x) each = float(int64_t(engine())) * 0x1p-60f;
    std::vector<uint8_t> codes(coding.code_bytes(n));
    quantize(coding, x.data(), n, engine() >> 1, 1, codes.data(), scales.data(), values.data());
    mutate(bytes_of(codes));
    mutate(bytes_of(scales));
    dequantize(coding, codes.data(), scales.data(), n, 1, values.data());
}

// Returns the fields of a message of a region that do not depend on a step.
Header region_header(size_t length, bool dense) {
    return {{'S', 'P', 'C', 'L'}, 3, uint8_t(!dense), kFloat32, uint8_t(dense), 0, 0, length, 0, 0};
}

// Makes messages of a region of a vector, and adds one that is mutated or cut off to another
// vector, and writes it. Returns whether it was read.
bool read_region() {
    Coding coding{.bits = 2 + int(below(7)),
                  .group = size_t{8} << below(4),
                  .two_means = false,
                  .narrow = true,
                  .stochastic = false,
                  .seed = 0};
    coding.two_means = coding.bits == 2;
    const Regions regions{below(one_in(8) ? 20000 : 1000), 1 + below(5), size_t{64} << below(5)};
    const size_t rank = below(regions.ranks), length = regions.length(rank);
    const bool dense = one_in(4);
    std::vector<float> x(regions.size), sums(regions.size), zeros(regions.size);
    for (float& each : x) each = float(int64_t(engine())) * 0x1p-60f;
    const size_t inner = below(regions.size + 1);
    const Limit limits[] = {{inner, uint32_t(below(0x42000000) + 1)},
                            {regions.size, uint32_t(0x40000000 + below(0x2000000))}};
    const size_t most = dense ? length : below(length + 1);
    Selected selected(coding, length, most, dense);
    const bool adds = one_in(2);
    regions.each_piece(rank, 0, regions.blocks(rank), [&](size_t begin, size_t n, size_t place) {
        const float* const memory = adds ? x.data() + begin : nullptr;
        const float* const addend = adds ? zeros.data() + begin : nullptr;
        float* const to = (adds ? sums : x).data() + begin;
        selected.take(memory, addend, to, n, begin, place, limits);
    });
    const Header header = region_header(length, dense);
    const Written made = selected.finish(header);
    std::vector<uint8_t> message(made.bytes.data(), made.bytes.data() + made.length);
    const auto whole = read_packed(message.data(), message.size(), header, coding);
    expect(whole.has_value() && whole->count == made.count, "a valid message was refused");
    mutate(one_in(4) ? bytes_of(message) : bytes_of(message).subspan(sizeof(Header)));
    if (one_in(4)) {
        message.resize(below(message.size() + 1));
        message.shrink_to_fit();
    }
    auto read = read_packed(message.data(), message.size(), header, coding);
    if (!read) return false;
    expect(read->length == length && read->count <= length, "impossible counts were accepted");
    std::vector<Packed> messages;
    messages.push_back(std::move(*read));
    std::vector<float> out(regions.size);
    add_packed(regions, rank, messages, coding, sums.data(), 1 + int(below(2)));
    write_packed(regions, rank, messages[0], coding, 3, out.data());
    return true;
}

}  // namespace
}  // namespace sparcel

int main(int argc, char** argv) {
    using namespace sparcel;
    return fuzz(argc, argv, "messages", [] {
        if (one_in(3)) return read_region();
        if (one_in(2)) return read_plain();
        const bool accepted = one_in(2) ? read_packed<int32_t>() : read_packed<int64_t>();
        read_few_bits();
        return accepted;
    });
}
