#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "base/bindings.hpp"
#include "streams/bracket.hpp"
#include "streams/histogram.hpp"
#include "streams/select_chunks.hpp"

namespace sparcel {
namespace {

using Pair = std::pair<Output, Output>;

template <class Index, class Storage>
Pair give_selection(Selection<Index, Storage>&& selection, nb::dlpack::dtype dtype) {
    return {give(std::move(selection.indices), selection.count, dtype_of<Index>()),
            give(std::move(selection.values), selection.count, dtype)};
}

// The difference in bits of two magnitudes that differ by a factor of two.
template <class T>
constexpr auto exponent_step() {
    using Key = typename Bits<StorageOf<T>>::Key;
    if constexpr (std::is_same_v<T, Half>) return Key{1} << 10;
    if constexpr (std::is_same_v<T, Brain>) return Key{1} << 7;
    if constexpr (std::is_same_v<T, float>) return Key{1} << 23;
    if constexpr (std::is_same_v<T, double>) return Key{1} << 52;
}

// Selects k entries of the vector, or of every chunk if chunk is not 0.
template <class T, class Index, class Source>
Selection<Index, StorageOf<T>> select(const Source& first, const Vector<StorageOf<T>>& again,
                                      size_t n, size_t k, size_t chunk, int threads,
                                      typename Bits<StorageOf<T>>::Key& largest) {
    k = std::min(k, n);
    if (k == 0 && std::is_same_v<Source, Vector<StorageOf<T>>>) {
        return Selection<Index, StorageOf<T>>(0);
    }
    if (chunk == 0) return select_largest<Index>(first, again, n, k, threads, largest);
    return select_chunks<Index>(first, again, n, k, chunk, threads, exponent_step<T>(), largest);
}

Pair topk(const Input& x, size_t k, size_t chunk, int threads) {
    return with_float(x.dtype(), [&]<class T>(Type<T>) {
        return with_index_for(x.size(), [&]<class Index>(Type<Index>) {
            const Vector<StorageOf<T>> vector{data<StorageOf<T>>(x)};
            auto selection = [&] {
                nb::gil_scoped_release release;
                typename Bits<StorageOf<T>>::Key largest = 0;
                return select<T, Index>(vector, vector, x.size(), k, chunk, threads, largest);
            }();
            return give_selection(std::move(selection), x.dtype());
        });
    });
}

template <class Float, class Gradient, class Index>
std::tuple<Output, Output, bool> accumulate(const Addition<Float>& addition, const InOut& gradient,
                                            bool clear, size_t k, size_t chunk, int threads) {
    using Storage = StorageOf<Float>;
    const size_t n = gradient.size();
    auto* const read = data<Gradient>(gradient);
    const Sum<Float, Gradient> sum{addition, read, clear ? read : nullptr};
    typename Bits<Storage>::Key largest = 0;
    auto selection = [&] {
        nb::gil_scoped_release release;
        const Vector<Storage> again{reinterpret_cast<const Storage*>(addition.scratch)};
        auto chosen = select<Float, Index>(sum, again, n, k, chunk, threads, largest);
        const size_t tasks = useful_threads(n, threads);
        parallel(tasks, [&](size_t task) {
            const size_t end = split_point(chosen.count, task + 1, tasks);
            for (size_t i = split_point(chosen.count, task, tasks); i < end; ++i) {
                addition.scratch[chosen.indices[i]] = 0;
            }
        });
        return chosen;
    }();
    const bool finite = std::isfinite(std::bit_cast<Float>(largest));
    auto [indices, values] = give_selection(std::move(selection), dtype_of<Float>());
    return {std::move(indices), std::move(values), finite};
}

std::tuple<Output, Output, bool> accumulate_topk(const InOut& memory, const InOut& gradient,
                                                 const InOut& scratch, double scale,
                                                 double momentum,
                                                 const std::optional<InOut>& velocity,
                                                 const std::optional<InOut>& entering, bool clear,
                                                 size_t k, size_t chunk, int threads) {
    const auto alike = [&](const InOut& vector) {
        return vector.size() == memory.size() && vector.dtype() == memory.dtype();
    };
    require(memory.size() == gradient.size() && alike(scratch) && (!velocity || alike(*velocity)) &&
                (!entering || alike(*entering)),
            "all vectors must have one length, and all but the gradient the dtype of memory");
    return with_type<float, double>(memory.dtype(), [&]<class Float>(Type<Float>) {
        const Addition<Float> addition{
            data<Float>(memory),
            data<Float>(scratch),
            Float(scale),
            Float(momentum),
            velocity ? data<Float>(*velocity) : nullptr,
            entering ? data<Float>(*entering) : nullptr,
            // Chunks may be read again soon, so their sums should stay in the cache.
            chunk == 0 && memory.size() * sizeof(Float) > kStreamBytes,
        };
        return with_float(gradient.dtype(), [&]<class Gradient>(Type<Gradient>) {
            return with_index_for(memory.size(), [&]<class Index>(Type<Index>) {
                return accumulate<Float, Gradient, Index>(addition, gradient, clear, k, chunk,
                                                          threads);
            });
        });
    });
}

Pair threshold_select(const Input& x, const Input& threshold, int threads) {
    require(threshold.size() == 1 && threshold.dtype() == x.dtype(),
            "the threshold must be one value of the vector's dtype");
    return with_float(x.dtype(), [&]<class T>(Type<T>) {
        return with_index_for(x.size(), [&]<class Index>(Type<Index>) {
            using Storage = StorageOf<T>;
            using Key = typename Bits<Storage>::Key;
            const Key limit = load_bits(data<Storage>(threshold)) & Bits<Storage>::magnitude;
            auto selection = [&] {
                nb::gil_scoped_release release;
                return select_reaching<Index>(Vector<Storage>{data<Storage>(x)}, x.size(),
                                              std::max<Key>(limit, 1), threads);
            }();
            return give_selection(std::move(selection), x.dtype());
        });
    });
}

Output histogram(const Input& x, int shift, size_t bins, std::optional<uint64_t> prefix,
                 int threads) {
    require(bins > 0 && std::has_single_bit(bins) && shift >= 0 && shift < 64,
            "bins must be a power of two and shift a number of bits");
    const Field field{shift, bins, std::countr_zero(bins), prefix.has_value(), prefix.value_or(0)};
    Buffer<int64_t> counts(bins);
    with_float(x.dtype(), [&]<class T>(Type<T>) {
        nb::gil_scoped_release release;
        magnitude_histogram(data<StorageOf<T>>(x), x.size(), field, threads, counts.data());
    });
    return give(std::move(counts), bins, dtype_of<int64_t>());
}

Output ends_of(const Input& x, int threads) {
    require(x.size() > 0, "a vector without entries has no mean");
    Buffer<double> ends(2);
    with_float(x.dtype(), [&]<class T>(Type<T>) {
        nb::gil_scoped_release release;
        const auto [mean, peak] = magnitude_ends<StorageOf<T>>(data<T>(x), x.size(), threads);
        ends[0] = mean, ends[1] = peak;
    });
    return give(std::move(ends), 2, dtype_of<double>());
}

Output bracket_of(const Input& x, const Input& thresholds, size_t k, int threads) {
    require(thresholds.size() > 1 && thresholds.dtype() == x.dtype(),
            "at least two thresholds of the vector's dtype are needed");
    Buffer<int64_t> found(3);
    with_float(x.dtype(), [&]<class T>(Type<T>) {
        using Storage = StorageOf<T>;
        using Key = typename Bits<Storage>::Key;
        nb::gil_scoped_release release;
        std::vector<Key> limits(thresholds.size());
        for (size_t i = 0; i < limits.size(); ++i) {
            limits[i] = load_bits(data<Storage>(thresholds) + i) & Bits<Storage>::magnitude;
        }
        const detail::Limits<Key> table(std::move(limits), Bits<Storage>::magnitude + Key{1});
        const auto place = bracket(data<Storage>(x), x.size(), table, k, threads);
        std::copy(place.begin(), place.end(), found.data());
    });
    return give(std::move(found), 3, dtype_of<int64_t>());
}

}  // namespace

void bind_select(nb::module_& module) {
    using namespace nb::literals;
    module.def("topk", topk, "x"_a.noconvert(), "k"_a, "chunk"_a, "threads"_a);
    module.def("accumulate_topk", accumulate_topk, "memory"_a.noconvert(), "gradient"_a.noconvert(),
               "scratch"_a.noconvert(), "scale"_a, "momentum"_a, "velocity"_a.noconvert().none(),
               "entering"_a.noconvert().none(), "clear"_a, "k"_a, "chunk"_a, "threads"_a);
    module.def("threshold_select", threshold_select, "x"_a.noconvert(), "threshold"_a.noconvert(),
               "threads"_a);
    module.def("magnitude_histogram", histogram, "x"_a.noconvert(), "shift"_a, "bins"_a,
               "prefix"_a.none(), "threads"_a);
    module.def("magnitude_ends", ends_of, "x"_a.noconvert(), "threads"_a);
    module.def("bracket", bracket_of, "x"_a.noconvert(), "thresholds"_a.noconvert(), "k"_a,
               "threads"_a);
}

}  // namespace sparcel
