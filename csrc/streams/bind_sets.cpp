#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "base/bindings.hpp"
#include "streams/sets.hpp"

namespace sparcel {
namespace {

using Pair = std::pair<Output, Output>;

// Keeps the entries whose indices are among `others`, or the rest. `width` is the length of a row,
// or empty for scalars.
template <bool kPresent>
Pair filter_entries(const Input& indices, const Input& values, const Input& others,
                    std::optional<size_t> width) {
    require(indices.dtype() == others.dtype(), "both lists of indices must have one dtype");
    require(values.size() == indices.size() * width.value_or(1),
            "each index needs its value or row");
    return with_index(indices.dtype(), [&]<class Index>(Type<Index>) {
        return with_value(values.dtype(), [&]<class Value>(Type<Value>) -> Pair {
            const StreamView<Index, Value> stream{data<Index>(indices), data<Value>(values),
                                                  indices.size()};
            auto kept = [&] {
                nb::gil_scoped_release release;
                return filter<kPresent>(stream, data<Index>(others), others.size(),
                                        width.value_or(1));
            }();
            return {give(std::move(kept.indices), kept.count, dtype_of<Index>()),
                    give(std::move(kept.values), kept.count, dtype_of<Value>(), width)};
        });
    });
}

}  // namespace

void bind_sets(nb::module_& module) {
    using namespace nb::literals;
    module.def("within", filter_entries<true>, "indices"_a, "values"_a, "others"_a,
               "width"_a.none());
    module.def("without", filter_entries<false>, "indices"_a, "values"_a, "others"_a,
               "width"_a.none());
}

}  // namespace sparcel
