// The module. Bindings check only arguments that could lead to invalid memory accesses;
// sparcel.core.kernels checks the rest, with better error messages.
#include "base/bindings.hpp"

#include "simd/kernels.hpp"

namespace sparcel {
namespace {

void bind_isa(nb::module_& module) {
    module.def("isa", [] { return kernels().name; }, "Name the instruction set in use.");
    module.def(
        "set_isa",
        [](const char* name) {
            require(set_isa(name), "this machine or this build has no such instruction set");
        },
        nb::arg("name"), "Use 'portable', 'avx2' or 'avx512', for tests and benchmarks.");
}

void bind_blocks(nb::module_& module) {
    module.def(
        "empty",
        [](size_t bytes) { return give(Buffer<uint8_t>(bytes), bytes, dtype_of<uint8_t>()); },
        nb::arg("bytes"), "Make an uninitialised uint8 tensor whose memory is used again later.");
    module.def(
        "kept_bytes", [] { return Blocks::shared().waiting_bytes(); },
        "Tell how many bytes of freed memory wait to be used again.");
    module.def(
        "drop_kept", [] { Blocks::shared().drop(); }, nb::call_guard<nb::gil_scoped_release>(),
        "Give the system the freed memory that waits to be used again, and what malloc keeps.");
}

}  // namespace
}  // namespace sparcel

NB_MODULE(_cpu, module) {
    // A thread may still use a mesh when the interpreter exits; that leak does not matter.
    nanobind::set_leak_warnings(false);
    module.doc() = "CPU kernels of sparcel; sparcel.core.kernels documents them.";
    sparcel::bind_isa(module);
    sparcel::bind_blocks(module);
    sparcel::bind_ahead(module);
    sparcel::bind_select(module);
    sparcel::bind_merge(module);
    sparcel::bind_message(module);
    sparcel::bind_pack(module);
    sparcel::bind_regions(module);
    sparcel::bind_scatter(module);
    sparcel::bind_sets(module);
    sparcel::bind_squares(module);
    sparcel::bind_svmlight(module);
    sparcel::bind_quantize(module);
    sparcel::bind_text(module);
    sparcel::bind_mesh(module);
    sparcel::bind_linear(module);
    sparcel::bind_coordinates(module);
    sparcel::bind_delta(module);
}
