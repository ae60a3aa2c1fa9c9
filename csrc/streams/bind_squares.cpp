#include <nanobind/stl/vector.h>

#include "base/bindings.hpp"
#include "streams/squares.hpp"

namespace sparcel {
namespace {

// Returns the sum of squares of each vector, as float64.
Output sums_of(const std::vector<Input>& vectors, size_t chunk, int threads) {
    require(chunk > 0, "a chunk has at least one entry");
    std::vector<Squared> given;
    for (const Input& vector : vectors) {
        given.push_back(with_float(vector.dtype(), [&]<class T>(Type<T>) {
            return squared(data<T>(vector), vector.size());
        }));
    }
    Buffer<double> sums(vectors.size());
    {
        nb::gil_scoped_release release;
        sums_of_squares(given, chunk, threads, sums.data());
    }
    return give(std::move(sums), vectors.size(), dtype_of<double>());
}

}  // namespace

void bind_squares(nb::module_& module) {
    using namespace nb::literals;
    module.def("sums_of_squares", sums_of, "vectors"_a, "chunk"_a, "threads"_a);
}

}  // namespace sparcel
