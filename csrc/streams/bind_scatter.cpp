#include <nanobind/stl/string_view.h>

#include "base/bindings.hpp"
#include "base/operations.hpp"
#include "streams/scatter.hpp"

namespace sparcel {
namespace {

// Calls run(Index, Value types, limit) once indices and values are known to fit `dense`, whose
// indices lie below the limit. It returns how many entries it wrote: fewer than there are if
// another thread has changed the indices meanwhile.
template <class Run>
void with_entries(const InOut& dense, const Input& indices, const Input& values, size_t width,
                  const Run& run) {
    require(values.dtype() == dense.dtype(), "values must have the dtype of dense");
    require(values.size() == indices.size() * width, "each index needs its value or row");
    if (width == 0) return;
    with_index(indices.dtype(), [&]<class Index>(Type<Index> index) {
        const size_t limit = dense.size() / width;
        bool outside = false;
        const Index* places = data<Index>(indices);
        {
            nb::gil_scoped_release release;
            for (size_t i = 0; i < indices.size(); ++i) outside |= size_t(places[i]) >= limit;
        }
        if (!outside) {
            with_value(dense.dtype(), [&]<class Value>(Type<Value> value) {
                nb::gil_scoped_release release;
                outside = run(index, value, limit) < indices.size();
            });
        }
        if (outside)
            throw nb::index_error(
                "an index lies outside the dense vector, is out of order, or was changed "
                "meanwhile");
    });
}

void reduce_into(const InOut& dense, const Input& indices, const Input& values, size_t width,
                 std::string_view op) {
    with_entries(dense, indices, values, width,
                 [&]<class Index, class Value>(Type<Index>, Type<Value>, size_t limit) {
                     return with_operation(op, [&]<class Op>(Type<Op>) {
                         return scatter_reduce<Op>(data<Value>(dense), limit, data<Index>(indices),
                                                   data<Value>(values), indices.size(), width);
                     });
                 });
}

void scatter_into(const InOut& dense, const Input& indices, const Input& values, size_t width) {
    with_entries(dense, indices, values, width,
                 [&]<class Index, class Value>(Type<Index>, Type<Value>, size_t limit) {
                     return scatter(data<Value>(dense), limit, data<Index>(indices),
                                    data<Value>(values), 0, indices.size(), width);
                 });
}

void expand_into(const InOut& dense, const Input& fill, const Input& indices, const Input& values,
                 size_t width) {
    require(fill.size() == 1 && fill.dtype() == dense.dtype(),
            "fill must be one value of the dtype of dense");
    with_entries(dense, indices, values, width,
                 [&]<class Index, class Value>(Type<Index>, Type<Value>, size_t limit) {
                     return expand(data<Value>(dense), limit, *data<Value>(fill),
                                   data<Index>(indices), data<Value>(values), indices.size(),
                                   width);
                 });
}

void add_saturated_into(const InOut& dense, const Input& indices, const Input& values) {
    with_entries(dense, indices, values, 1,
                 [&]<class Index, class Value>(Type<Index>, Type<Value>, size_t limit) -> size_t {
                     if constexpr (std::is_floating_point_v<Value>) {
                         return add_saturated(data<Value>(dense), limit, data<Index>(indices),
                                              data<Value>(values), indices.size());
                     } else {
                         throw nb::type_error("memory is float32 or float64");
                     }
                 });
}

int64_t check(const Input& indices, int64_t size) {
    return with_index(indices.dtype(), [&]<class Index>(Type<Index>) {
        nb::gil_scoped_release release;
        return check_indices(data<Index>(indices), indices.size(), size);
    });
}

}  // namespace

void bind_scatter(nb::module_& module) {
    using namespace nb::literals;
    module.def("scatter_reduce", reduce_into, "dense"_a.noconvert(), "indices"_a.noconvert(),
               "values"_a.noconvert(), "width"_a, "op"_a);
    module.def("scatter", scatter_into, "dense"_a.noconvert(), "indices"_a.noconvert(),
               "values"_a.noconvert(), "width"_a);
    module.def("expand", expand_into, "dense"_a.noconvert(), "fill"_a, "indices"_a.noconvert(),
               "values"_a.noconvert(), "width"_a);
    module.def("add_saturated", add_saturated_into, "dense"_a.noconvert(), "indices"_a.noconvert(),
               "values"_a.noconvert());
    module.def("check_indices", check, "indices"_a.noconvert(), "size"_a);
}

}  // namespace sparcel
