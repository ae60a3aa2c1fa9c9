// Changes of weights. An array's bits are taken as unsigned integers of its itemsize.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/bindings.hpp"
#include "delta/delta.hpp"

namespace sparcel {
namespace {

// The elements, or how many there are, with key, first, row and stride of a `Piece`.
using Given = std::tuple<std::optional<InOut>, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t>;
using Arrays = std::vector<Given>;

constexpr uint64_t kMostElements = uint64_t{1} << 31;

template <class Run>
auto with_word(size_t itemsize, const Run& run) {
    switch (itemsize) {
        case 1:
            return run(Type<uint8_t>());
        case 2:
            return run(Type<uint16_t>());
        case 4:
            return run(Type<uint32_t>());
        case 8:
            return run(Type<uint64_t>());
    }
    throw nb::type_error("elements have 1, 2, 4 or 8 bytes");
}

template <class Word>
constexpr nb::dlpack::dtype signed_dtype() {
    return {uint8_t(nb::dlpack::dtype_code::Int), 8 * sizeof(Word), 1};
}

std::vector<Piece> pieces_of(const Arrays& arrays, size_t itemsize) {
    std::vector<Piece> pieces;
    uint64_t total = 0;
    for (const auto& [array, count, key, first, row, stride] : arrays) {
        require(row > 0, "a row has elements");
        require(!array || (array->size() == count && array->itemsize() == itemsize),
                "an array must have as many elements as its piece, of one itemsize");
        require(count <= kMostElements && (total += count) <= kMostElements,
                "a chunk has at most 2^31 elements");
        pieces.push_back({array ? array->data() : nullptr, size_t(count), key, first, row, stride});
    }
    return pieces;
}

nb::bytes as_bytes(CodedBytes coded) {
    return nb::bytes(reinterpret_cast<const char*>(coded.begin), size_t(coded.end - coded.begin));
}

template <class T>
nb::list as_list(const T* numbers, size_t count) {
    nb::list list;
    for (size_t i = 0; i < count; ++i) list.append(numbers[i]);
    return list;
}

Told told_by(const std::string& code) {
    if (code == "values") return Told::values;
    if (code == "steps") return Told::steps;
    if (code == "nibbles") return Told::nibbles;
    throw nb::value_error("changes are told by values, steps or nibbles");
}

// Codes how the elements of `now` differ from those of `old`, by values, or by steps or nibbles.
// Returns which pieces change, how many nibbles are told, the limits of the classes, the elements
// that change in each, how many last bits are 0, the streams of places, values and bits, and what
// the changes add to the sum.
nb::object encode(const Arrays& old_arrays, const Arrays& now_arrays, size_t itemsize, bool floats,
                  unsigned fraction, unsigned most_classes, bool steps) {
    require(old_arrays.size() == now_arrays.size(), "every piece has old and new elements");
    const auto old = pieces_of(old_arrays, itemsize), now = pieces_of(now_arrays, itemsize);
    for (size_t i = 0; i < old.size(); ++i) {
        require(old[i].known() && now[i].known() && old[i].count == now[i].count,
                "every piece has as many old elements as new ones");
    }
    require(most_classes >= 1 && most_classes <= kMostClasses, "there are one to six classes");
    const BitLayout layout{floats, fraction};
    return with_word(itemsize, [&]<class Word>(Type<Word>) -> nb::object {
        Streams streams;
        Classes classes;
        Told told = steps ? Told::steps : Told::values;
        unsigned shift = 0;
        uint64_t sum = 0;
        std::vector<size_t> kept;
        size_t count = 0;
        {
            nb::gil_scoped_release release;
            if (floats && most_classes > 1) {
                classes = classes_for(sampled_exponents<Word>(old, now, layout), most_classes);
            }
            const size_t most = elements_of(old);
            OwnChanges<Word> changes(most);
            Buffer<uint32_t> of_rank(most);
            Buffer<uint8_t> of_class(most);
            const Ranks ranks{of_rank.data(), of_class.data()};
            count = find_changes(old, now, layout, classes, changes.view(), ranks, kept);
            std::vector<Piece> changed;
            for (const size_t i : kept) changed.push_back(old[i]);
            sum = hashed_changes(changed, changes.view(), count);
            if (steps) shift = zeros_below(changes.view(), count);
            if (steps && !floats && packs_nibbles(changes.view(), count, shift)) {
                told = Told::nibbles;
                shift = 0;
            }
            streams = code_changes(changes.view(), count, ranks, layout, classes, told, shift);
        }
        size_t nibbles = 0;
        if (told == Told::nibbles) {
            nibbles = classes.changes[0];
            classes.changes[0] = count;
        }
        return nb::make_tuple(
            as_list(kept.data(), kept.size()), nibbles, as_list(classes.limits, classes.count - 1),
            as_list(classes.changes, classes.count), shift, as_bytes(streams.coded.places),
            as_bytes(streams.coded.values), as_bytes(streams.coded.bits), sum);
    });
}

// Returns places, new values, and what the changes add to the sum; or None if the streams are not
// what they should be. Where the elements of a piece are not given, steps stand for new values.
nb::object decode(const Arrays& arrays, size_t itemsize, bool floats, unsigned fraction,
                  const std::string& code, unsigned shift, const std::vector<uint8_t>& limits,
                  const std::vector<uint64_t>& counts, const Bytes& data, size_t values_begin,
                  size_t bits_begin, size_t end) {
    const auto pieces = pieces_of(arrays, itemsize);
    const Told told = told_by(code);
    const bool packed = told == Told::nibbles;
    const size_t total = elements_of(pieces) * (packed ? 2 * itemsize : 1);
    CodedChanges coded{{floats, fraction}, {}, told, shift, {}, {}, {}};
    require(
        counts.size() >= 1 && counts.size() <= kMostClasses && limits.size() + 1 == counts.size(),
        "there are one to six classes, and a limit between any two");
    coded.classes.count = unsigned(counts.size());
    std::copy(limits.begin(), limits.end(), coded.classes.limits);
    uint64_t changed = 0;
    for (size_t c = 0; c < counts.size(); ++c) {
        require(counts[c] <= total && (changed += counts[c]) <= total,
                "there must not be more changes than elements");
        coded.classes.changes[c] = counts[c];
    }
    for (const Piece& piece : pieces) {
        require(piece.known() || (coded.classes.count == 1 && !packed),
                "classes and nibbles need the old elements");
    }
    require(!packed || coded.classes.count == 1, "nibbles are of one class");
    require(shift < 8 * itemsize, "fewer bits are 0 than there are");
    require(values_begin <= bits_begin && bits_begin <= end && end <= data.size() &&
                data.size() - end >= kCodeSlack,
            "the streams must lie in the data");
    require(fraction < 8 * itemsize, "a fraction has fewer bits than its float");
    const uint8_t* bytes = data.data();
    coded.places = {bytes, bytes + values_begin};
    coded.values = {bytes + values_begin, bytes + bits_begin};
    coded.bits = {bytes + bits_begin, bytes + end};
    return with_word(itemsize, [&]<class Word>(Type<Word>) -> nb::object {
        OwnChanges<Word> changes(std::min<size_t>(changed, elements_of(pieces)));
        uint64_t sum = 0;
        size_t found = kTorn;
        {
            nb::gil_scoped_release release;
            const auto& passes = kernels().delta.readers<Word>();
            found = passes.decode(coded, pieces.data(), pieces.size(), changes.view());
            if (found != kTorn) sum = hashed_changes(pieces, changes.view(), found);
        }
        if (found == kTorn) return nb::none();
        return nb::make_tuple(give(std::move(changes.places), found, dtype_of<int32_t>()),
                              give(std::move(changes.after), found, signed_dtype<Word>()), sum);
    });
}

// Exchanges elements with values; their places are those of `decode`.
void swap(const Arrays& arrays, const Input& places, const InOut& values) {
    const auto pieces = pieces_of(arrays, values.itemsize());
    require(places.dtype() == dtype_of<int32_t>() && values.size() == places.size(),
            "every value has a place");
    for (const Piece& piece : pieces) require(piece.known(), "every piece has elements");
    const size_t total = elements_of(pieces);
    const auto* numbers = data<uint32_t>(places);
    nb::gil_scoped_release release;
    const size_t count = places.size();
    uint32_t largest = 0;
    for (size_t i = 0; i < count; ++i) largest = std::max(largest, numbers[i]);
    if (count && largest >= total) throw nb::value_error("places must lie in the chunk");
    with_word(values.itemsize(), [&]<class Word>(Type<Word>) {
        swap_changes(pieces, numbers, data<Word>(values), count);
    });
}

// Returns a byte for each element: see `remember`.
Output remember_elements(const Input& elements, bool floats) {
    const size_t n = elements.size();
    Buffer<uint8_t> low(n);
    {
        nb::gil_scoped_release release;
        with_word(elements.itemsize(), [&]<class Word>(Type<Word>) {
            remember(data<Word>(elements), n, floats, low.data());
        });
    }
    return give(std::move(low), n, dtype_of<uint8_t>());
}

// Returns what elements were, as integers: see `recall`.
Output recall_elements(const Input& now, const Input& low, bool floats) {
    const size_t n = now.size();
    require(low.size() == n && low.itemsize() == 1, "there is a byte for each element");
    return with_word(now.itemsize(), [&]<class Word>(Type<Word>) {
        Buffer<Word> before(n);
        {
            nb::gil_scoped_release release;
            recall(data<Word>(now), data<uint8_t>(low), n, floats, before.data());
        }
        return give(std::move(before), n, signed_dtype<Word>());
    });
}

// The sum of the hashed elements of pieces.
uint64_t sum(const Arrays& arrays, size_t itemsize) {
    const auto pieces = pieces_of(arrays, itemsize);
    for (const Piece& piece : pieces) require(piece.known(), "every piece has elements");
    nb::gil_scoped_release release;
    return with_word(itemsize, [&]<class Word>(Type<Word>) {
        uint64_t total = 0;
        for (const Piece& piece : pieces) total += kernels().delta.readers<Word>().sum(piece);
        return total;
    });
}

}  // namespace

void bind_delta(nb::module_& module) {
    using namespace nb::literals;
    module.attr("CODE_SLACK") = kCodeSlack;
    module.attr("MOST_CLASSES") = kMostClasses;
    module.def("delta_encode", encode, "old"_a, "now"_a, "itemsize"_a, "floats"_a, "fraction"_a,
               "most_classes"_a, "steps"_a);
    module.def("delta_decode", decode, "pieces"_a, "itemsize"_a, "floats"_a, "fraction"_a, "code"_a,
               "shift"_a, "limits"_a, "counts"_a, "data"_a, "values_begin"_a, "bits_begin"_a,
               "end"_a);
    module.def("delta_swap", swap, "pieces"_a, "places"_a, "values"_a);
    module.def("delta_remember", remember_elements, "elements"_a, "floats"_a);
    module.def("delta_recall", recall_elements, "now"_a, "low"_a, "floats"_a);
    module.def("delta_sum", sum, "pieces"_a, "itemsize"_a);
}

}  // namespace sparcel
