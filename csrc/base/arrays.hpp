// Conversion of arrays from and to Python. Only this file turns dtypes into C++ types.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/buffer.hpp"
#include "base/memory_pool.hpp"
#include "base/numbers.hpp"

namespace sparcel {

namespace nb = nanobind;

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using InOut = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class Framework>
using OutputOf = nb::ndarray<Framework, nb::c_contig, nb::device::cpu>;
using Output = OutputOf<nb::pytorch>;
using NumpyOutput = OutputOf<nb::numpy>;

template <class T>
constexpr nb::dlpack::dtype dtype_of() {
    if constexpr (std::is_same_v<T, Half>) return {uint8_t(nb::dlpack::dtype_code::Float), 16, 1};
    if constexpr (std::is_same_v<T, Brain>) return {uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1};
    if constexpr (std::is_same_v<T, float>) return {uint8_t(nb::dlpack::dtype_code::Float), 32, 1};
    if constexpr (std::is_same_v<T, double>) return {uint8_t(nb::dlpack::dtype_code::Float), 64, 1};
    if constexpr (std::is_same_v<T, int32_t>) return {uint8_t(nb::dlpack::dtype_code::Int), 32, 1};
    if constexpr (std::is_same_v<T, int64_t>) return {uint8_t(nb::dlpack::dtype_code::Int), 64, 1};
    if constexpr (std::is_same_v<T, uint8_t>) return {uint8_t(nb::dlpack::dtype_code::UInt), 8, 1};
    if constexpr (std::is_same_v<T, uint16_t>)
        return {uint8_t(nb::dlpack::dtype_code::UInt), 16, 1};
}

template <class T>
struct Type {
    using type = T;
};

// Calls run(Type<T>()) with the type among Ts that `dtype` stands for.
template <class... Ts, class Run>
auto with_type(nb::dlpack::dtype dtype, const Run& run) {
    using Result = decltype((run(Type<Ts>()), ...));
    if constexpr (std::is_void_v<Result>) {
        if (!((dtype == dtype_of<Ts>() && (run(Type<Ts>()), true)) || ...)) {
            throw nb::type_error("this kernel does not take arrays of that dtype");
        }
    } else {
        Result result;
        if (!((dtype == dtype_of<Ts>() && (result = run(Type<Ts>()), true)) || ...)) {
            throw nb::type_error("this kernel does not take arrays of that dtype");
        }
        return result;
    }
}

template <class Run>
auto with_float(nb::dlpack::dtype dtype, const Run& run) {
    return with_type<Half, Brain, float, double>(dtype, run);
}

template <class Run>
auto with_value(nb::dlpack::dtype dtype, const Run& run) {
    return with_type<Half, Brain, float, double, int32_t, int64_t>(dtype, run);
}

template <class Run>
auto with_index(nb::dlpack::dtype dtype, const Run& run) {
    return with_type<int32_t, int64_t>(dtype, run);
}

// Calls run(Type<Index>()) with the index type that can count n coordinates.
template <class Run>
auto with_index_for(size_t n, const Run& run) {
    return n <= INT32_MAX ? run(Type<int32_t>()) : run(Type<int64_t>());
}

// The unsigned integer type of a float's bits.
template <class T>
using StorageOf = std::conditional_t<sizeof(T) == 2, uint16_t,
                                     std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

template <class T>
const T* data(const Input& array) {
    return static_cast<const T*>(array.data());
}

template <class T>
T* data(const InOut& array) {
    return static_cast<T*>(array.data());
}

// Hands a buffer over to Python: `count` scalars, or rows of `width`. If the contents take less
// than half of a large block, they move to a smaller one.
template <class Framework = nb::pytorch, class T>
OutputOf<Framework> give(Buffer<T>&& buffer, size_t count, nb::dlpack::dtype dtype,
                         std::optional<size_t> width = {}) {
    const size_t scalars = count * width.value_or(1);
    if (scalars < buffer.capacity() / 2 && buffer.capacity() * sizeof(T) >= Blocks::kLeastBytes) {
        buffer.resize(scalars);
    }
    T* memory = buffer.release();
    nb::capsule owner(memory, [](void* data) noexcept { GiveBack()(data); });
    const size_t shape[] = {count, width.value_or(1)};
    return OutputOf<Framework>(memory, width ? 2 : 1, shape, owner, nullptr, dtype);
}

inline void require(bool holds, const char* message) {
    if (!holds) throw nb::value_error(message);
}

}  // namespace sparcel
