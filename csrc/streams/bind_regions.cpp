#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/bindings.hpp"
#include "streams/regions.hpp"

namespace sparcel {
namespace {

using Shares = std::vector<std::pair<size_t, double>>;

Coding coding_of(int bits, size_t group) {
    require(2 <= bits && bits <= 8, "bits must lie in [2, 8]");
    require(group % 8 == 0 && group > 0 && kMostResidual % group == 0,
            "a scale must serve 8, 16, 32 or 64 values");
    return {.bits = bits,
            .group = group,
            .two_means = bits == 2,
            .narrow = true,
            .stochastic = false,
            .seed = 0};
}

Regions regions_of(size_t size, size_t ranks, size_t block, size_t rank) {
    require(size <= INT32_MAX, "indices must fit in 32 bits");
    require(block >= 64 && std::has_single_bit(block), "impossible block");
    require(rank < ranks, "no such rank");
    return {size, ranks, block};
}

Selection selection_of(const Shares& shares, size_t size, bool dense, int bits, size_t group,
                       uint64_t step) {
    require(!shares.empty() && shares.back().first == size, "shares are of all coordinates");
    return {coding_of(bits, group), shares, dense, step};
}

Header header_of(nb::bytes bytes) {
    Header header;
    require(bytes.size() == sizeof header, "a header has 40 bytes");
    std::memcpy(&header, bytes.c_str(), sizeof header);
    return header;
}

std::vector<Header> headers_of(const std::vector<nb::bytes>& given, size_t ranks) {
    require(given.size() == ranks, "there must be a header for each rank");
    std::vector<Header> headers;
    for (const nb::bytes& one : given) headers.push_back(header_of(one));
    return headers;
}

nb::object given(Written& written) {
    return nb::cast(give(std::move(written.bytes), written.length, dtype_of<uint8_t>()));
}

// Computes scratch = memory + what enters, and takes out of it what this rank sends of the other
// regions. Returns the messages by rank, an empty one for its own, their entries, and by how much
// the magnitude fell.
nb::tuple enter(const InOut& memory, const InOut& gradient, const InOut& scratch, double scale,
                size_t rank, size_t ranks, size_t block, const Shares& shares,
                const std::vector<size_t>& most, bool dense, int bits, size_t group, uint64_t step,
                const std::vector<nb::bytes>& leaving, int threads) {
    const size_t n = gradient.size();
    const auto fits = [&](const InOut& vector) {
        return vector.size() == n && vector.dtype() == dtype_of<float>();
    };
    require(fits(memory) && fits(scratch),
            "all vectors must have one length, and all but the gradient be float32");
    const Regions regions = regions_of(n, ranks, block, rank);
    const Selection selection = selection_of(shares, n, dense, bits, group, step);
    const std::vector<Header> headers = headers_of(leaving, ranks);
    require(most.size() == ranks, "there must be a bound for each rank");
    std::vector<Written> written;
    with_type<Half, Brain, float>(gradient.dtype(), [&]<class Gradient>(Type<Gradient>) {
        const Entering<Gradient> source{data<float>(memory), data<Gradient>(gradient),
                                        float(scale)};
        float* const x = data<float>(scratch);
        nb::gil_scoped_release release;
        written = take_others(regions, rank, source, selection, most, headers, x, threads);
    });
    nb::list messages;
    size_t count = 0;
    double magnitude = 0;
    for (size_t owner = 0; owner < ranks; ++owner) {
        messages.append(given(written[owner]));
        count += written[owner].count;
        magnitude += written[owner].magnitude;
    }
    return nb::make_tuple(messages, count, magnitude);
}

// Messages, checked; none if one of them is not what its header should say.
using Arrived = std::optional<std::vector<Packed>>;

// Reads a message by rank, but for that of `skipped`.
template <class LengthOf>
Arrived read_all(const std::vector<Bytes>& messages, size_t skipped,
                 const std::vector<Header>& headers, const Coding& coding,
                 const LengthOf& length_of) {
    std::vector<Packed> arrived;
    for (size_t i = 0; i < messages.size(); ++i) {
        if (i == skipped) continue;
        auto one = read_packed(messages[i].data(), messages[i].size(), headers[i], coding);
        if (!one) return {};
        require(one->length == length_of(i), "a message is of another region");
        arrived.push_back(std::move(*one));
    }
    return arrived;
}

// Adds the other ranks' messages to this rank's region of x, and takes out of it what it returns.
// Gives the message, by how much the region's magnitude fell, and whether a message was something
// else (nothing has changed then).
nb::tuple collect(const InOut& x, const std::vector<Bytes>& messages, nb::bytes expected,
                  std::pair<int, size_t> arriving, size_t rank, size_t ranks, size_t block,
                  const Shares& shares, size_t most, bool dense, int bits, size_t group,
                  uint64_t step, nb::bytes header, int threads) {
    require(x.dtype() == dtype_of<float>(), "the vector must be float32");
    require(messages.size() == ranks, "there must be a message for each rank");
    const Regions regions = regions_of(x.size(), ranks, block, rank);
    const Selection selection = selection_of(shares, x.size(), dense, bits, group, step);
    const Coding coding = coding_of(arriving.first, arriving.second);
    const std::vector<Header> headers(ranks, header_of(expected));
    Header leaving = header_of(header);
    float* const sums = data<float>(x);
    double added = 0;
    Arrived arrived;
    Written returned;
    {
        nb::gil_scoped_release release;
        arrived =
            read_all(messages, rank, headers, coding, [&](size_t) { return regions.length(rank); });
        if (arrived) {
            for (const Packed& one : *arrived) {
                if (!one.finite) leaving.flags = uint8_t(leaving.flags | kNonFinite);
            }
            added = add_packed(regions, rank, *arrived, coding, sums, threads);
            returned = take_own(regions, rank, selection, most, leaving, sums);
        }
    }
    return nb::make_tuple(given(returned), returned.magnitude - added, !arrived);
}

// Writes what all owners returned, over the divisor, to `out`. Gives the entries, whether all that
// was written is finite, and whether a message was something else.
nb::tuple deliver(const std::vector<Bytes>& messages, const std::vector<nb::bytes>& expected,
                  size_t block, int bits, size_t group, double divisor, const InOut& out,
                  int threads) {
    const size_t ranks = messages.size();
    const Regions regions = regions_of(out.size(), ranks, block, 0);
    const Coding coding = coding_of(bits, group);
    const std::vector<Header> headers = headers_of(expected, ranks);
    size_t count = 0;
    bool finite = true;
    Arrived arrived;
    {
        nb::gil_scoped_release release;
        arrived = read_all(messages, ranks, headers, coding,
                           [&](size_t owner) { return regions.length(owner); });
        if (arrived) {
            for (const Packed& one : *arrived) count += one.count;
            with_type<Half, Brain, float>(out.dtype(), [&]<class Out>(Type<Out>) {
                finite =
                    write_all(regions, *arrived, coding, float(divisor), threads, data<Out>(out));
            });
        }
    }
    return nb::make_tuple(count, finite, !arrived);
}

}  // namespace

void bind_regions(nb::module_& module) {
    using namespace nb::literals;
    module.def("enter", enter, "memory"_a.noconvert(), "gradient"_a.noconvert(),
               "scratch"_a.noconvert(), "scale"_a, "rank"_a, "ranks"_a, "block"_a, "shares"_a,
               "most"_a, "dense"_a, "bits"_a, "group"_a, "step"_a, "leaving"_a, "threads"_a);
    module.def("collect", collect, "x"_a.noconvert(), "messages"_a, "expected"_a, "arriving"_a,
               "rank"_a, "ranks"_a, "block"_a, "shares"_a, "most"_a, "dense"_a, "bits"_a, "group"_a,
               "step"_a, "header"_a, "threads"_a);
    module.def("deliver", deliver, "messages"_a, "expected"_a, "block"_a, "bits"_a, "group"_a,
               "divisor"_a, "out"_a.noconvert(), "threads"_a);
}

}  // namespace sparcel
