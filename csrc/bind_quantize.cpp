#include <nanobind/stl/pair.h>

#include "bindings.hpp"
#include "quantize.hpp"

namespace sparcel {
namespace {

Quantizer make_quantizer(int bits, size_t bucket, size_t n) {
    require(bits == 8 || bits == 4 || bits == 2, "bits must be 8, 4 or 2");
    require(bucket > 0, "bucket must be at least 1");
    return {bits, std::min(bucket, std::max<size_t>(n, 1))};
}

std::pair<Output, Output> quantize(const Input& x, int bits, size_t bucket, uint64_t seed,
                                   uint64_t offset, int threads) {
    const size_t n = x.size();
    const Quantizer quantizer = make_quantizer(bits, bucket, n);
    Buffer<uint8_t> packed(quantizer.packed_bytes(n));
    Buffer<float> scales(quantizer.buckets(n));
    with_float(x.dtype(), [&]<class T>(Type<T>) {
        nb::gil_scoped_release release;
        quantizer.quantize(data<T>(x), n, seed, offset, threads, packed.data(), scales.data());
    });
    return {give(std::move(packed), quantizer.packed_bytes(n), dtype_of<uint8_t>()),
            give(std::move(scales), quantizer.buckets(n), dtype_of<float>())};
}

Output dequantize(const Input& packed, const Input& scales, size_t size, int bits, size_t bucket,
                  int threads) {
    const Quantizer quantizer = make_quantizer(bits, bucket, size);
    require(packed.dtype() == dtype_of<uint8_t>() && scales.dtype() == dtype_of<float>() &&
                packed.size() == quantizer.packed_bytes(size) &&
                scales.size() == quantizer.buckets(size),
            "packed must be uint8 and scales float32, both with the length that fits size");
    Buffer<float> values(size);
    {
        nb::gil_scoped_release release;
        quantizer.dequantize(data<uint8_t>(packed), data<float>(scales), size, threads,
                             values.data());
    }
    return give(std::move(values), size, dtype_of<float>());
}

}  // namespace

void bind_quantize(nb::module_& module) {
    using namespace nb::literals;
    module.def("quantize", quantize, "x"_a.noconvert(), "bits"_a, "bucket"_a, "seed"_a, "offset"_a,
               "threads"_a);
    module.def("dequantize", dequantize, "packed"_a.noconvert(), "scales"_a.noconvert(), "size"_a,
               "bits"_a, "bucket"_a, "threads"_a);
}

}  // namespace sparcel
