#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "merge.hpp"
#include "message.hpp"
#include "operations.hpp"

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

// Reduces the streams in messages. Returns the indices, the values and whether all are finite, or
// None if a message is not a plain sparse one of that size and dtype. `dtype` is its code in
// message headers.
nb::object merge_messages(const std::vector<Bytes>& messages, uint64_t size, uint8_t dtype,
                          std::string_view op, int threads) {
    const auto run = [&]<class Value>(Type<Value>) -> nb::object {
        std::vector<StreamView<int32_t, Value>> views;
        bool finite = true;
        for (const Bytes& message : messages) {
            const auto view =
                read_sparse<Value>(message.data(), message.size(), size, dtype, finite);
            if (!view) return nb::none();
            views.push_back(*view);
        }
        auto merged = with_operation(op, [&]<class Op>(Type<Op>) {
            nb::gil_scoped_release release;
            return merge<Op, int32_t, Value>(views, 1, threads);
        });
        return nb::make_tuple(give(std::move(merged.indices), merged.count, dtype_of<int32_t>()),
                              give(std::move(merged.values), merged.count, dtype_of<Value>()),
                              finite);
    };
    switch (dtype) {
        case 0:
            return run(Type<Half>());
        case 1:
            return run(Type<Brain>());
        case 2:
            return run(Type<float>());
        case 3:
            return run(Type<double>());
        case 4:
            return run(Type<int32_t>());
        case 5:
            return run(Type<int64_t>());
        default:
            return nb::none();
    }
}

}  // namespace

void bind_merge(nb::module_& module) {
    using namespace nb::literals;
    module.def("merge", merge_streams, "indices"_a, "values"_a, "width"_a.none(), "op"_a,
               "threads"_a);
    module.def("merge_messages", merge_messages, "messages"_a, "size"_a, "dtype"_a, "op"_a,
               "threads"_a);
}

}  // namespace sparcel
