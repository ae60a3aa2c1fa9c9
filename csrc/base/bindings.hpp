#pragma once

#include "base/arrays.hpp"

namespace sparcel {

void bind_ahead(nb::module_& module);
void bind_select(nb::module_& module);
void bind_merge(nb::module_& module);
void bind_message(nb::module_& module);
void bind_pack(nb::module_& module);
void bind_regions(nb::module_& module);
void bind_scatter(nb::module_& module);
void bind_sets(nb::module_& module);
void bind_squares(nb::module_& module);
void bind_svmlight(nb::module_& module);
void bind_quantize(nb::module_& module);
void bind_text(nb::module_& module);
void bind_mesh(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_coordinates(nb::module_& module);
void bind_delta(nb::module_& module);

}  // namespace sparcel
