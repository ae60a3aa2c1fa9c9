#include "base/bindings.hpp"
#include "rows/svmlight.hpp"

namespace sparcel {
namespace {

// Parses a block of whole lines. Returns offsets, columns, values, labels and the labels' spans.
nb::tuple parse_svmlight(const Bytes& block, int64_t index_from, int64_t dimensions) {
    const char* text = reinterpret_cast<const char*>(block.data());
    require(block.size() == 0 || text[block.size() - 1] == '\n', "a block must end with a newline");
    require(index_from == 0 || index_from == 1, "indices must begin with 0 or with 1");
    return with_index_for(size_t(dimensions), [&]<class Index>(Type<Index>) {
        auto found = [&] {
            nb::gil_scoped_release release;
            return SvmlightParser<Index>(text, block.size(), index_from, dimensions).run();
        }();
        const size_t rows = found.rows, entries = found.entries;
        return nb::make_tuple(
            give<nb::numpy>(std::move(found.offsets), rows + 1, dtype_of<int64_t>()),
            give<nb::numpy>(std::move(found.columns), entries, dtype_of<Index>()),
            give<nb::numpy>(std::move(found.values), entries, dtype_of<float>()),
            give<nb::numpy>(std::move(found.labels), rows, dtype_of<double>()),
            give<nb::numpy>(std::move(found.spans), rows, dtype_of<int64_t>(), 2));
    });
}

// Raises the Python exception `type` with the line and the message as its arguments.
void translate(const std::exception_ptr& error, void* type) {
    try {
        std::rethrow_exception(error);
    } catch (const MalformedLine& malformed) {
        PyErr_SetObject(static_cast<PyObject*>(type),
                        nb::make_tuple(malformed.line, malformed.what()).ptr());
    }
}

}  // namespace

void bind_svmlight(nb::module_& module) {
    using namespace nb::literals;
    nb::object malformed =
        nb::steal(PyErr_NewException("sparcel._cpu.MalformedLineError", PyExc_ValueError, nullptr));
    module.attr("MalformedLineError") = malformed;
    nb::register_exception_translator(translate, malformed.release().ptr());
    module.def("parse_svmlight", parse_svmlight, "block"_a, "index_from"_a, "dimensions"_a);
}

}  // namespace sparcel
