#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>

#include "base/bindings.hpp"
#include "streams/regions.hpp"

namespace sparcel {
namespace {

using Shares = std::vector<std::pair<size_t, double>>;  // where a range stops, and its density

Coding coding_of(int bits, size_t block) {
    require(bits == 8 || bits == 4 || bits == 2, "bits must be 8, 4 or 2");
    require(block % 8 == 0 && block > 0 && kMostResidual % block == 0,
            "a scale must serve 8, 16, 32 or 64 values");
    return {.bits = bits,
            .block = block,
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

Header header_of(nb::bytes bytes) {
    Header header;
    require(bytes.size() == sizeof header, "a header has 40 bytes");
    std::memcpy(&header, bytes.c_str(), sizeof header);
    return header;
}

// The coordinates of a region, or of all others, in order.
class Domain {
  public:
    Domain(const Regions& regions, size_t rank, bool others)
        : regions_(regions), rank_(rank), others_(others) {}

    size_t before(size_t end) const {
        const size_t owned = regions_.before(rank_, end);
        return others_ ? end - owned : owned;
    }
    size_t coordinate(size_t place) const {
        const size_t number = place / regions_.block, others = regions_.ranks - 1;
        const size_t skipped =  // blocks before it that are not of this domain
            others_ ? (number + others - rank_) / others : number * others + rank_;
        return place + skipped * regions_.block;
    }

  private:
    const Regions& regions_;
    size_t rank_;
    bool others_;
};

template <class Number>
std::vector<Limit> limits_of(const Shares& shares, const Domain& domain, uint64_t step,
                             const Number& number) {
    std::vector<Limit> limits;
    size_t first = 0;
    for (const auto& [stop, density] : shares) {
        const size_t last = domain.before(stop);
        const auto at = [&](size_t place) { return number(domain.coordinate(first + place)); };
        limits.push_back({stop, sampled_threshold(last - first, density, step, at)});
        first = last;
    }
    return limits;
}

struct Message {
    size_t length = 0;
    Buffer<uint8_t> bytes = {};
};

Message finished(Selected& selected, const Header& header) {
    selected.finish();
    Message message;
    message.bytes = selected.message(header, message.length);
    return message;
}

nb::object given(Message& message) {
    return nb::cast(give(std::move(message.bytes), message.length, dtype_of<uint8_t>()));
}

std::vector<Header> headers_of(const std::vector<nb::bytes>& given) {
    std::vector<Header> headers;
    for (const nb::bytes& one : given) headers.push_back(header_of(one));
    return headers;
}

// Computes scratch = memory + what enters, and takes out of it what this rank sends of the other
// regions. Returns the messages by rank, their entries, and the magnitude that left.
nb::tuple enter(const InOut& memory, const InOut& gradient, const InOut& scratch, double scale,
                size_t rank, size_t ranks, size_t block, const Shares& shares,
                const std::vector<size_t>& most, bool dense, int bits, size_t scaled, uint64_t step,
                const std::vector<nb::bytes>& leaving, int threads) {
    const size_t n = gradient.size();
    const auto fits = [&](const InOut& vector) {
        return vector.size() == n && vector.dtype() == dtype_of<float>();
    };
    require(fits(memory) && fits(scratch),
            "all vectors must have one length, and all but the gradient be float32");
    const Regions regions = regions_of(n, ranks, block, rank);
    const Coding coding = coding_of(bits, scaled);
    const std::vector<Header> headers = headers_of(leaving);
    require(most.size() == ranks && headers.size() == ranks && !shares.empty() &&
                shares.back().first == n,
            "there must be a bound and a header for each rank, and shares of all coordinates");
    std::deque<std::optional<Selected>> sent(ranks);
    std::vector<Message> made(ranks);
    with_type<Half, Brain, float>(gradient.dtype(), [&]<class Gradient>(Type<Gradient>) {
        const Entering<Gradient> source{data<float>(memory), data<Gradient>(gradient),
                                        float(scale)};
        float* const x = data<float>(scratch);
        nb::gil_scoped_release release;
        std::vector<Limit> limits;
        if (!dense) {
            const auto sum = [&](size_t i) { return source.sum(i); };
            limits = limits_of(shares, Domain(regions, rank, true), step, sum);
        }
        for (size_t owner = 0; owner < ranks; ++owner) {
            const size_t length = regions.length(owner);
            if (owner != rank) sent[owner].emplace(coding, length, most[owner], dense);
        }
        const size_t tasks = std::min(useful_threads(n, threads), ranks);
        parallel(tasks, [&](size_t task) {
            for (size_t owner = split_point(ranks, task, tasks);
                 owner < split_point(ranks, task + 1, tasks); ++owner) {
                const auto take = [&](size_t begin, size_t count, size_t place) {
                    alignas(64) float room[kMostPiece];
                    const float* const addend = source.addends(begin, count, room);
                    if (sent[owner]) {
                        return sent[owner]->take(source.memory + begin, addend, x + begin, count,
                                                 begin, place, limits);
                    }
                    for (size_t i = 0; i < count; ++i) {
                        x[begin + i] = source.memory[begin + i] + addend[i];
                    }
                };
                regions.each_block(owner, 0, regions.blocks(owner), take);
                if (sent[owner]) made[owner] = finished(*sent[owner], headers[owner]);
            }
        });
    });
    nb::list messages;
    size_t count = 0;
    double magnitude = 0;
    for (size_t owner = 0; owner < ranks; ++owner) {
        if (!sent[owner]) {
            messages.append(nb::none());
            continue;
        }
        count += sent[owner]->count();
        magnitude += sent[owner]->magnitude();
        messages.append(given(made[owner]));
    }
    return nb::make_tuple(messages, count, magnitude);
}

// Reads messages. Returns them, or the number of one that is not what `headers` says.
std::pair<std::vector<Packed>, ptrdiff_t> read_all(const std::vector<Bytes>& messages,
                                                   const std::vector<Header>& headers,
                                                   const Coding& coding) {
    std::vector<Packed> packed;
    for (size_t i = 0; i < messages.size(); ++i) {
        auto one = read_packed(messages[i].data(), messages[i].size(), headers[i], coding);
        if (!one) return {std::move(packed), ptrdiff_t(i)};
        packed.push_back(std::move(*one));
    }
    return {std::move(packed), -1};
}

// Adds messages to this rank's region of x, and takes out of it what it returns. Gives the
// message, by how much the region's magnitude fell, and the number of a message that is something
// else (-1 for none; nothing has changed then).
nb::tuple collect(const InOut& x, const std::vector<Bytes>& messages, nb::bytes expected,
                  size_t rank, size_t ranks, size_t block, const Shares& shares, size_t most,
                  bool dense, int bits, size_t scaled, uint64_t step, nb::bytes header,
                  int threads) {
    require(x.dtype() == dtype_of<float>(), "the vector must be float32");
    const Regions regions = regions_of(x.size(), ranks, block, rank);
    const Coding coding = coding_of(bits, scaled);
    require(!shares.empty() && shares.back().first == x.size(), "shares are of all coordinates");
    const std::vector<Header> headers(messages.size(), header_of(expected));
    Header leaving = header_of(header);
    float* const sums = data<float>(x);
    std::optional<Selected> returned;
    double arrived = 0;
    ptrdiff_t wrong = -1;
    Message made;
    {
        nb::gil_scoped_release release;
        auto [packed, bad] = read_all(messages, headers, coding);
        wrong = bad;
        for (const Packed& one : packed) {
            require(one.length == regions.length(rank), "a message is of another region");
            if (!one.finite) leaving.flags = uint8_t(leaving.flags | kNonFinite);
        }
        if (wrong < 0) {
            arrived = add_packed(regions, rank, packed, coding, sums, threads);
            std::vector<Limit> limits;
            if (!dense) {
                limits = limits_of(shares, Domain(regions, rank, false), step,
                                   [&](size_t i) { return sums[i]; });
            }
            returned.emplace(coding, regions.length(rank), most, dense);
            regions.each_block(
                rank, 0, regions.blocks(rank), [&](size_t begin, size_t n, size_t place) {
                    returned->take(nullptr, nullptr, sums + begin, n, begin, place, limits);
                });
            made = finished(*returned, leaving);
        }
    }
    if (wrong >= 0) return nb::make_tuple(nb::none(), 0.0, wrong);
    return nb::make_tuple(given(made), returned->magnitude() - arrived, wrong);
}

// Writes what all owners returned, over the divisor, to `out`. Gives the entries, whether all that
// was written is finite, and the number of a message as `collect` does.
nb::tuple deliver(const std::vector<Bytes>& messages, const std::vector<nb::bytes>& expected,
                  size_t block, int bits, size_t scaled, double divisor, const InOut& out,
                  int threads) {
    const size_t ranks = messages.size();
    const Regions regions = regions_of(out.size(), ranks, block, 0);
    const Coding coding = coding_of(bits, scaled);
    require(expected.size() == ranks, "there must be a header for each rank");
    const std::vector<Header> headers = headers_of(expected);
    size_t count = 0;
    ptrdiff_t wrong = -1;
    std::vector<uint8_t> finite(ranks, true);
    {
        nb::gil_scoped_release release;
        auto [packed, bad] = read_all(messages, headers, coding);
        wrong = bad;
        for (size_t rank = 0; rank < packed.size(); ++rank) {
            require(packed[rank].length == regions.length(rank), "a message is of another region");
            count += packed[rank].count;
        }
        if (wrong < 0) {
            with_type<Half, Brain, float>(out.dtype(), [&]<class Out>(Type<Out>) {
                const size_t tasks = std::min(useful_threads(out.size(), threads), ranks);
                parallel(tasks, [&](size_t task) {
                    for (size_t rank = split_point(ranks, task, tasks);
                         rank < split_point(ranks, task + 1, tasks); ++rank) {
                        finite[rank] = write_packed(regions, rank, packed[rank], coding,
                                                    float(divisor), data<Out>(out));
                    }
                });
            });
        }
    }
    const bool all = std::ranges::all_of(finite, [](uint8_t one) { return one != 0; });
    return nb::make_tuple(count, all, wrong);
}

}  // namespace

void bind_regions(nb::module_& module) {
    using namespace nb::literals;
    module.def("enter", enter, "memory"_a.noconvert(), "gradient"_a.noconvert(),
               "scratch"_a.noconvert(), "scale"_a, "rank"_a, "ranks"_a, "block"_a, "shares"_a,
               "most"_a, "dense"_a, "bits"_a, "scaled"_a, "step"_a, "leaving"_a, "threads"_a);
    module.def("collect", collect, "x"_a.noconvert(), "messages"_a, "expected"_a, "rank"_a,
               "ranks"_a, "block"_a, "shares"_a, "most"_a, "dense"_a, "bits"_a, "scaled"_a,
               "step"_a, "header"_a, "threads"_a);
    module.def("deliver", deliver, "messages"_a, "expected"_a, "block"_a, "bits"_a, "scaled"_a,
               "divisor"_a, "out"_a.noconvert(), "threads"_a);
}

}  // namespace sparcel
