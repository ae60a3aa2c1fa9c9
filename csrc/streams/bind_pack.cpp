#include "base/bindings.hpp"
#include "streams/pack.hpp"

namespace sparcel {
namespace {

// Returns the words that hold sorted indices below `size`, as int64.
Output pack(const Input& indices, int64_t size) {
    const size_t count = indices.size();
    require(size >= 0 && count <= size_t(size), "there must not be more indices than coordinates");
    return with_index(indices.dtype(), [&]<class Index>(Type<Index>) {
        const Packing packing(count, uint64_t(size));
        Buffer<uint64_t> words(packing.words);
        const bool packed = [&] {
            nb::gil_scoped_release release;
            return pack_indices(packing, data<Index>(indices), words.data());
        }();
        require(packed, "indices must be sorted, and lie in the vector");
        return give(std::move(words), packing.words, dtype_of<int64_t>());
    });
}

// Returns the indices in words, or None if the words hold another number of them.
nb::object unpack(const Input& words, uint64_t count, int64_t size) {
    require(size >= 0 && count <= uint64_t(size),
            "there must not be more indices than coordinates");
    const Packing packing(count, uint64_t(size));
    require(words.dtype() == dtype_of<int64_t>() && words.size() == packing.words,
            "the words must be those of so many indices");
    return with_index_for(size_t(size), [&]<class Index>(Type<Index>) -> nb::object {
        Buffer<Index> indices(count + kUnpackSlack);
        const bool unpacked = [&] {
            nb::gil_scoped_release release;
            return unpack_indices(packing, data<uint64_t>(words), indices.data());
        }();
        if (!unpacked) return nb::none();
        return nb::cast(give(std::move(indices), count, dtype_of<Index>()));
    });
}

}  // namespace

void bind_pack(nb::module_& module) {
    using namespace nb::literals;
    module.def("pack_indices", pack, "indices"_a, "size"_a);
    module.def("unpack_indices", unpack, "words"_a, "count"_a, "size"_a);
}

}  // namespace sparcel
