#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <string_view>
#include <tuple>

#include "base/bindings.hpp"
#include "rows/hashed_rows.hpp"

namespace sparcel {
namespace {

using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Documents view(const Bytes& text, const Offsets& offsets) {
    const int64_t* const first = offsets.data();
    const int64_t* const end = first + offsets.size();
    require(
        first != end && *first >= 0 && size_t(end[-1]) <= text.size() && std::is_sorted(first, end),
        "offsets must begin at zero or later, ascend and end within the text");
    return {text.data(), first, offsets.size() - 1};
}

Analyzer analyzer_of(std::string_view name) {
    if (name == "word") return Analyzer::kWord;
    if (name == "char") return Analyzer::kCharacter;
    require(name == "char_wb", "analyzer must be word, char or char_wb");
    return Analyzer::kCharacterInWord;
}

RowNorm norm_of(std::optional<std::string_view> name) {
    if (!name) return RowNorm::kNone;
    require(name == "l1" || name == "l2", "norm must be l1, l2 or None");
    return name == "l1" ? RowNorm::kSum : RowNorm::kEuclidean;
}

std::tuple<NumpyOutput, NumpyOutput, NumpyOutput> hash_ngrams(
    const Bytes& text, const Offsets& offsets, const Bytes& classes, std::string_view analyzer,
    size_t low, size_t high, bool lowercase, uint64_t dimensions, bool alternate_sign, bool binary,
    std::optional<std::string_view> norm, int threads) {
    const Documents documents = view(text, offsets);
    require(low > 0, "n-grams have at least one unit");
    require(dimensions > 0 && dimensions <= INT64_MAX, "dimensions must be in [1, 2^63 - 1]");
    const NgramSettings ngrams{
        analyzer_of(analyzer), low, high, lowercase, {classes.data(), classes.size()}};
    const HashSettings hash{dimensions, alternate_sign, binary, norm_of(norm)};
    return with_index_for(dimensions, [&]<class Index>(Type<Index>) {
        HashedRows<Index> rows = [&] {
            nb::gil_scoped_release release;
            return hash_rows<Index>(documents, ngrams, hash, threads);
        }();
        return std::tuple{
            give<nb::numpy>(std::move(rows.offsets), documents.count + 1, dtype_of<int64_t>()),
            give<nb::numpy>(std::move(rows.columns), rows.count, dtype_of<Index>()),
            give<nb::numpy>(std::move(rows.values), rows.count, dtype_of<float>())};
    });
}

}  // namespace

void bind_text(nb::module_& module) {
    using namespace nb::literals;
    module.def("hash_ngrams", hash_ngrams, "text"_a, "offsets"_a, "classes"_a, "analyzer"_a,
               "low"_a, "high"_a, "lowercase"_a, "dimensions"_a, "alternate_sign"_a, "binary"_a,
               "norm"_a.none(), "threads"_a);
}

}  // namespace sparcel
