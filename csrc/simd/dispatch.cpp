#include <atomic>
#include <cstring>

#include "simd/kernels.hpp"

namespace sparcel {
namespace {

bool runs(const Kernels& set) {
#ifdef SPARCEL_X86
    // Checks all that CMakeLists.txt lets the compiler use: a hypervisor may mask any of them.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt");
    if (&set == &avx512_kernels) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
    if (&set == &avx2_kernels) return avx2;
#endif
    return &set == &portable_kernels;
}

const Kernels* const kSets[] = {// the best first
#ifdef SPARCEL_X86
                                &avx512_kernels, &avx2_kernels,
#endif
                                &portable_kernels};

const Kernels* best() {
    for (const Kernels* set : kSets) {
        if (runs(*set)) return set;
    }
    return &portable_kernels;
}

std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> set = best();
    return set;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool set_isa(const char* name) {
    for (const Kernels* set : kSets) {
        if (std::strcmp(set->name, name) == 0 && runs(*set)) {
            chosen() = set;
            return true;
        }
    }
    return false;
}

}  // namespace sparcel
