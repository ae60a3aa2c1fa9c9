// Operations by their names in sparcel.core.ops.
#pragma once

#include <string_view>

#include "base/arrays.hpp"
#include "base/numbers.hpp"

namespace sparcel {

template <class Run>
auto with_operation(std::string_view name, const Run& run) {
    if (name == "sum") return run(Type<AddOp>());
    if (name == "product") return run(Type<MultiplyOp>());
    if (name == "min") return run(Type<MinOp>());
    if (name == "max") return run(Type<MaxOp>());
    throw nb::value_error("op must be sum, product, min or max");
}

}  // namespace sparcel
