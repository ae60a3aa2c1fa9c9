#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "base/bindings.hpp"
#include "linear/coordinates.hpp"
#include "linear/linear.hpp"
#include "linear/losses.hpp"

namespace sparcel {
namespace {

// The arrays of a shard by columns. Its methods share `marks`, so only one may run at a time.
struct Shard {
    Input offsets, rows, values, targets;
    std::optional<Input> weights;
    size_t width;  // how many classes are told from the rest
    Buffer<uint32_t> marks;

    Shard(Input offsets, Input rows, Input values, Input targets, std::optional<Input> weights,
          size_t width)
        : offsets(std::move(offsets)),
          rows(std::move(rows)),
          values(std::move(values)),
          targets(std::move(targets)),
          weights(std::move(weights)),
          width(width),
          marks(height()) {
        require(this->offsets.dtype() == dtype_of<int64_t>() && this->offsets.size() > 0 &&
                    this->rows.dtype() == dtype_of<int32_t>() &&
                    this->rows.size() == this->values.size(),
                "the arrays of a shard do not fit one another");
        require(this->targets.dtype() == this->values.dtype() &&
                    (!this->weights || (this->weights->dtype() == this->values.dtype() &&
                                        this->weights->size() == height())),
                "each row needs its target and its weight, like the values");
        require(width > 0, "there must be a class to tell from the rest");
        check_entries();
        std::fill_n(marks.data(), height(), 0);
    }

    size_t height() const { return targets.size(); }
    size_t columns() const { return offsets.size() - 1; }

    void check_entries() const {
        const auto* const starts = data<int64_t>(offsets);
        const auto* const row = data<int32_t>(rows);
        require(starts[0] == 0 && size_t(starts[columns()]) == rows.size() &&
                    std::is_sorted(starts, starts + offsets.size()),
                "the offsets do not fit the entries");
        bool sorted = true, inside = true;
        for (size_t column = 0; column < columns(); ++column) {
            for (int64_t at = starts[column]; at < starts[column + 1]; ++at) {
                inside &= row[at] >= 0 && size_t(row[at]) < height();
                sorted &= at == starts[column] || row[at - 1] <= row[at];
            }
        }
        require(inside && sorted, "the rows of each column must be there, and in order");
    }

    ColumnList list(const Input& given) const {
        require(given.dtype() == dtype_of<int64_t>(), "columns must be int64");
        const ColumnList found(data<int64_t>(given), given.size());
        const auto outside = [&](int64_t c) { return c < 0 || size_t(c) >= columns(); };
        require(std::none_of(found.begin(), found.end(), outside), "no such column");
        return found;
    }

    void check_margins(const auto& margins) const {
        require(margins.dtype() == dtype_of<double>() && margins.size() == height() * width,
                "each row needs its margin in each class, as float64");
    }

    template <class Value>
    ShardView<Value> view() const {
        return {data<int64_t>(offsets), data<int32_t>(rows), data<Value>(values), height()};
    }

    template <class Value>
    Targets<Value> fitted() const {
        return {data<Value>(targets), weights ? data<Value>(*weights) : nullptr};
    }
};

// See `transpose`; `starts` has a place more than there are columns.
void transpose_rows(const Input& offsets, const Input& columns, const Input& values,
                    const InOut& starts, const InOut& out_rows, const InOut& out_values,
                    int threads) {
    require(offsets.dtype() == dtype_of<int64_t>() && starts.dtype() == dtype_of<int64_t>() &&
                out_rows.dtype() == dtype_of<int32_t>() && out_values.dtype() == values.dtype(),
            "the arrays by columns must be like those of the rows");
    require(offsets.size() > 0 && offsets.size() <= size_t{1} << 31 && starts.size() > 0,
            "there must be fewer than 2^31 rows");
    const size_t height = offsets.size() - 1, dimensions = starts.size() - 1;
    const auto* const ends = data<int64_t>(offsets);
    require(ends[0] == 0 && size_t(ends[height]) == columns.size() &&
                std::is_sorted(ends, ends + offsets.size()) && values.size() == columns.size() &&
                out_rows.size() >= columns.size() && out_values.size() >= columns.size(),
            "the arrays do not fit one another");
    with_index(columns.dtype(), [&]<class Column>(Type<Column>) {
        with_type<float, double>(values.dtype(), [&]<class Value>(Type<Value>) {
            nb::gil_scoped_release release;
            const auto* const column = data<Column>(columns);
            bool inside = true;
            for (size_t at = 0; at < columns.size(); ++at) {
                inside &= column[at] >= 0 && size_t(column[at]) < dimensions;
            }
            require(inside, "a column lies outside of the dimensions");
            transpose(Csr<Column, Value>{ends, column, data<Value>(values)}, height, dimensions,
                      threads, data<int64_t>(starts), data<int32_t>(out_rows),
                      data<Value>(out_values));
        });
    });
}

void differentiate_columns(Shard& shard, std::string_view loss, const Input& margins,
                           const Input& chosen, const Input& before, const Input& after,
                           const InOut& out, int threads) {
    const Draw draw{shard.list(chosen), shard.list(before), shard.list(after)};
    shard.check_margins(margins);
    require(out.dtype() == dtype_of<double>() && out.size() == 2 * shard.width * chosen.size(),
            "each column needs two sums for each class, as float64");
    bool known = false;
    with_type<float, double>(shard.values.dtype(), [&]<class Value>(Type<Value>) {
        nb::gil_scoped_release release;
        known = with_smooth_loss(loss, [&](auto function) {
            with_width(shard.width, [&](auto width) {
                differentiate(function, shard.view<Value>(), draw, data<double>(margins), width,
                              shard.fitted<Value>(), shard.marks.data(), threads,
                              data<double>(out));
            });
        });
    });
    require(known, "there is no smooth loss of that name");
}

void change_shard(const Shard& shard, const Input& columns, const Input& changes,
                  const InOut& margins, int threads) {
    const ColumnList found = shard.list(columns);
    shard.check_margins(margins);
    require(changes.dtype() == dtype_of<double>() && changes.size() == shard.width * found.size(),
            "each column needs its change in each class, as float64");
    with_type<float, double>(shard.values.dtype(), [&]<class Value>(Type<Value>) {
        nb::gil_scoped_release release;
        with_width(shard.width, [&](auto width) {
            change_margins(shard.view<Value>(), found, data<double>(changes), width, threads,
                           data<double>(margins));
        });
    });
}

double loss_of(const Shard& shard, std::string_view loss, const Input& margins, int threads) {
    shard.check_margins(margins);
    double total = 0;
    bool known = false;
    with_type<float, double>(shard.values.dtype(), [&]<class Value>(Type<Value>) {
        nb::gil_scoped_release release;
        known = with_loss(loss, [&](auto function) {
            total = sum_losses(function, data<double>(margins), shard.height(), shard.width,
                               shard.fitted<Value>(), threads);
        });
    });
    require(known, "there is no loss of that name");
    return total;
}

}  // namespace

void bind_coordinates(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<Shard>(module, "LinearShard")
        .def(nb::init<Input, Input, Input, Input, std::optional<Input>, size_t>(), "offsets"_a,
             "rows"_a, "values"_a, "targets"_a, "weights"_a.none(), "width"_a)
        .def("differentiate", differentiate_columns, "loss"_a, "margins"_a, "chosen"_a, "before"_a,
             "after"_a, "out"_a, "threads"_a)
        .def("change", change_shard, "columns"_a, "changes"_a, "margins"_a, "threads"_a)
        .def("loss", loss_of, "loss"_a, "margins"_a, "threads"_a);
    module.def("transpose", transpose_rows, "offsets"_a, "columns"_a, "values"_a, "starts"_a,
               "out_rows"_a, "out_values"_a, "threads"_a);
}

}  // namespace sparcel
