#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "base/bindings.hpp"
#include "base/operations.hpp"
#include "streams/merge.hpp"

namespace sparcel {
namespace {

using Pair = std::pair<Output, Output>;

template <class Op, class Index, class Value>
Pair run(const std::vector<Input>& indices, const std::vector<Input>& values,
         std::optional<size_t> width, int threads) {
    std::vector<StreamView<Index, Value>> views;
    for (size_t s = 0; s < indices.size(); ++s) {
        views.push_back({data<Index>(indices[s]), data<Value>(values[s]), indices[s].size()});
    }
    auto merged = [&] {
        nb::gil_scoped_release release;
        return merge<Op, Index, Value>(views, width.value_or(1), threads);
    }();
    return {give(std::move(merged.indices), merged.count, dtype_of<Index>()),
            give(std::move(merged.values), merged.count, dtype_of<Value>(), width)};
}

// `width` is the length of a row, or empty for scalars.
Pair merge_streams(const std::vector<Input>& indices, const std::vector<Input>& values,
                   std::optional<size_t> width, std::string_view op, int threads) {
    require(!indices.empty() && indices.size() == values.size(), "give one or more streams");
    for (size_t s = 0; s < indices.size(); ++s) {
        require(indices[s].dtype() == indices[0].dtype() && values[s].dtype() == values[0].dtype(),
                "all streams must have the same dtypes");
        require(values[s].size() == indices[s].size() * width.value_or(1),
                "a stream needs one value, or one row of the common width, for each index");
    }
    return with_operation(op, [&]<class Op>(Type<Op>) {
        return with_index(indices[0].dtype(), [&]<class Index>(Type<Index>) {
            return with_value(values[0].dtype(), [&]<class Value>(Type<Value>) {
                return run<Op, Index, Value>(indices, values, width, threads);
            });
        });
    });
}

}  // namespace

void bind_merge(nb::module_& module) {
    using namespace nb::literals;
    module.def("merge", merge_streams, "indices"_a, "values"_a, "width"_a.none(), "op"_a,
               "threads"_a);
}

}  // namespace sparcel
