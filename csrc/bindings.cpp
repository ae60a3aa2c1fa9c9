// The module: what it takes from Python is checked where a wrong call could touch foreign memory;
// meanings are checked, with better words, by sparcel.kernels.
#include "bindings.hpp"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cstdlib>

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

// Lets the process keep memory that it frees, up to a limit: given back to the system, every call
// that needs a few MB pays page faults again, which cost as much as merging them. MPI libraries
// do the same. Who has set the limits in the environment is left alone.
void keep_freed_memory() {
#ifdef __GLIBC__
    if (std::getenv("MALLOC_TRIM_THRESHOLD_") || std::getenv("MALLOC_MMAP_THRESHOLD_")) return;
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
#endif
}

}  // namespace
}  // namespace sparcel

NB_MODULE(_cpu, module) {
    // A thread may be inside a mesh when the interpreter goes: no leak that matters.
    nanobind::set_leak_warnings(false);
    module.doc() = "CPU kernels of sparcel; sparcel.kernels documents them.";
    sparcel::bind_isa(module);
    module.def("keep_freed_memory", sparcel::keep_freed_memory);
    sparcel::bind_select(module);
    sparcel::bind_merge(module);
    sparcel::bind_scatter(module);
    sparcel::bind_quantize(module);
    sparcel::bind_mesh(module);
}
