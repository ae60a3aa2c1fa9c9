#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/bindings.hpp"
#include "base/parallel.hpp"
#include "simd/kernels.hpp"

namespace sparcel {
namespace {

// Squares, the largest squares if there are any, and what AdamScale has.
using Scale = std::tuple<Input, std::optional<Input>, float, float, float, float>;
// Values, the direction that they move in, the rate, and how the direction is scaled.
using Move = std::tuple<Input, Input, float, std::optional<Scale>>;

// A move whose arrays are known to be of one length.
struct Checked {
    size_t n;
    const float *values, *direction;
    float rate;
    const float *squares = nullptr, *largest = nullptr;
    AdamScale scale = {};

    explicit Checked(const Move& move)
        : n(std::get<0>(move).size()),
          values(floats(std::get<0>(move))),
          direction(floats(std::get<1>(move))),
          rate(std::get<2>(move)) {
        if (const auto& given = std::get<3>(move)) {
            const auto& [own, most, beta, rest, correction, eps] = *given;
            squares = floats(own);
            if (most) largest = floats(*most);
            scale = {beta, rest, correction, eps};
        }
    }

    // Writes the entries [begin, end) once they have moved.
    void run(const AheadPasses& passes, size_t begin, size_t end, float* moved) const {
        const float *from = values + begin, *along = direction + begin;
        if (!squares) return passes.along(from, along, end - begin, rate, moved + begin);
        const auto pass = largest ? passes.amsgrad : passes.adam;
        pass(from, along, squares + begin, largest ? largest + begin : nullptr, end - begin, scale,
             rate, moved + begin);
    }

  private:
    const float* floats(const Input& array) const {
        require(array.dtype() == dtype_of<float>() && array.size() == n,
                "the arrays of a move must be float32, of one length");
        return data<float>(array);
    }
};

// Returns vectors with the values of tensors once they have moved.
std::vector<Output> move_all(const std::vector<Move>& given, int threads) {
    const std::vector<Checked> moves(given.begin(), given.end());
    std::vector<Buffer<float>> moved;
    size_t entries = 0;
    for (const Checked& move : moves) {
        moved.emplace_back(move.n);
        entries += move.n;
    }
    {
        nb::gil_scoped_release release;
        const AheadPasses& passes = kernels().ahead;
        const size_t tasks = useful_threads(entries, threads);
        parallel(tasks, [&](size_t task) {
            const size_t from = split_point(entries, task, tasks);
            const size_t to = split_point(entries, task + 1, tasks);
            size_t before = 0;  // entries of the tensors before this one
            for (size_t i = 0; i < moves.size(); before += moves[i++].n) {
                const size_t begin = std::clamp(from, before, before + moves[i].n) - before;
                const size_t end = std::clamp(to, before, before + moves[i].n) - before;
                if (begin < end) moves[i].run(passes, begin, end, moved[i].data());
            }
        });
    }
    std::vector<Output> found;
    for (size_t i = 0; i < moves.size(); ++i) {
        found.push_back(give(std::move(moved[i]), moves[i].n, dtype_of<float>()));
    }
    return found;
}

}  // namespace

void bind_ahead(nb::module_& module) {
    using namespace nb::literals;
    module.def("moved", move_all, "tensors"_a, "threads"_a);
}

}  // namespace sparcel
