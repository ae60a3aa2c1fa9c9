#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "base/bindings.hpp"
#include "streams/quantize.hpp"

namespace sparcel {
namespace {

Coding coding_of(int bits, size_t block, size_t n) {
    require(2 <= bits && bits <= 8, "bits must lie in [2, 8]");
    require(block > 0, "block must be at least 1");
    return {.bits = bits,
            .group = std::min(block, std::max<size_t>(n, 1)),
            .two_means = false,
            .narrow = false,
            .stochastic = false,
            .seed = 0};
}

// Returns codes, scales and values of float32 numbers.
std::tuple<Output, Output, Output> quantize_vector(const Input& x, int bits, size_t block,
                                                   std::optional<uint64_t> seed, uint64_t offset,
                                                   bool narrow_scales, int threads) {
    require(x.dtype() == dtype_of<float>(), "values must be float32");
    const size_t n = x.size();
    Coding coding = coding_of(bits, block, n);
    coding.two_means = bits == 2 && !seed;
    coding.narrow = narrow_scales;
    coding.stochastic = seed.has_value();
    coding.seed = seed.value_or(0);
    const size_t count = coding.scales_of(n);
    Buffer<uint8_t> codes(coding.code_bytes(n));
    Buffer<float> scales(count), values(n);
    Buffer<Brain> narrowed(narrow_scales ? count : 0);
    {
        nb::gil_scoped_release release;
        quantize(coding, data<float>(x), n, offset, threads, codes.data(), scales.data(),
                 values.data());
        for (size_t i = 0; narrow_scales && i < count; ++i) narrowed[i] = narrow<Brain>(scales[i]);
    }
    return {give(std::move(codes), coding.code_bytes(n), dtype_of<uint8_t>()),
            narrow_scales ? give(std::move(narrowed), count, dtype_of<Brain>())
                          : give(std::move(scales), count, dtype_of<float>()),
            give(std::move(values), n, dtype_of<float>())};
}

Output dequantize_vector(const Input& codes, const Input& scales, size_t size, int bits,
                         size_t block, int threads) {
    Coding coding = coding_of(bits, block, size);
    const size_t count = scales.size();
    coding.two_means = bits == 2 && count > coding.scales_of(size);
    require(codes.dtype() == dtype_of<uint8_t>() && codes.size() == coding.code_bytes(size) &&
                count == coding.scales_of(size),
            "codes must be uint8, and codes and scales have the length that fits size");
    Buffer<float> values(size);
    const auto run = [&](const float* wide) {
        nb::gil_scoped_release release;
        dequantize(coding, data<uint8_t>(codes), wide, size, threads, values.data());
    };
    if (scales.dtype() == dtype_of<float>()) {
        run(data<float>(scales));
    } else {
        require(scales.dtype() == dtype_of<Brain>(), "scales must be float32 or bfloat16");
        Buffer<float> wide(count);
        for (size_t i = 0; i < count; ++i) wide[i] = widen(data<Brain>(scales)[i]);
        run(wide.data());
    }
    return give(std::move(values), size, dtype_of<float>());
}

// Returns float32 numbers in 16 bits, finite ones limited to the largest.
Output limit_vector(const Input& x, bool brain, int threads) {
    require(x.dtype() == dtype_of<float>(), "values must be float32");
    const size_t n = x.size(), tasks = useful_threads(n, threads);
    Buffer<uint16_t> narrow(n);
    const auto pass = brain ? kernels().narrow.brain : kernels().narrow.half;
    {
        nb::gil_scoped_release release;
        parallel(tasks, [&](size_t task) {
            const size_t begin = split_point(n, task, tasks), end = split_point(n, task + 1, tasks);
            pass(data<float>(x) + begin, end - begin, narrow.data() + begin);
        });
    }
    return give(std::move(narrow), n, brain ? dtype_of<Brain>() : dtype_of<Half>());
}

}  // namespace

void bind_quantize(nb::module_& module) {
    using namespace nb::literals;
    module.def("quantize", quantize_vector, "x"_a.noconvert(), "bits"_a, "block"_a, "seed"_a.none(),
               "offset"_a, "narrow"_a, "threads"_a);
    module.def("dequantize", dequantize_vector, "codes"_a.noconvert(), "scales"_a.noconvert(),
               "size"_a, "bits"_a, "block"_a, "threads"_a);
    module.def("limited", limit_vector, "x"_a.noconvert(), "brain"_a, "threads"_a);
}

}  // namespace sparcel
