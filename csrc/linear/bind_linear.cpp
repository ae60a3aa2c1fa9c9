#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/bindings.hpp"
#include "linear/columns.hpp"
#include "linear/lazy.hpp"
#include "linear/linear.hpp"
#include "linear/losses.hpp"

namespace sparcel {
namespace {

using Optional = std::optional<InOut>;

// The numbers of a model of `width` classes, and how it is regularised.
struct Model {
    InOut rows;  // [dimensions, stride]: see lazy.hpp
    size_t width;
    bool adaptive;
    double l1, l2;
    double scale = 1, now = 0;

    Model(InOut rows, size_t width, bool adaptive, double l1, double l2)
        : rows(std::move(rows)), width(width), adaptive(adaptive), l1(l1), l2(l2) {
        require(width > 0 && this->rows.ndim() == 2 && this->rows.shape(1) == stride(),
                "a row of the model must hold what its rule needs");
    }

    bool settles() const { return adaptive ? l1 > 0 || l2 > 0 : l1 > 0; }
    size_t stride() const { return (adaptive ? 2 * width : width) + settles(); }
    size_t dimensions() const { return rows.shape(0); }
};

// The arrays of a batch by columns.
struct Batch {
    Input columns, places, values, targets;
    std::optional<Input> weights;
    std::vector<BlockStart> starts;

    Batch(Input columns, Input places, Input values, Input targets, std::optional<Input> weights)
        : columns(std::move(columns)),
          places(std::move(places)),
          values(std::move(values)),
          targets(std::move(targets)),
          weights(std::move(weights)) {
        require(this->places.dtype() == dtype_of<uint16_t>() &&
                    this->places.size() == this->values.size() &&
                    this->columns.size() <= this->values.size(),
                "the arrays of a batch do not fit one another");
        require(this->targets.dtype() == this->values.dtype() &&
                    (!this->weights || (this->weights->dtype() == this->values.dtype() &&
                                        this->weights->size() == this->targets.size())),
                "each row needs its target and its weight, like the values");
        const auto* entry = data<Place>(this->places);
        size_t first = 0;
        bool inside = this->places.size() == 0 || entry[0].first();
        for (size_t at = 0; at < this->places.size(); ++at) {
            first += entry[at].first();
            inside &= entry[at].row() < height();
        }
        require(inside && first == this->columns.size(), "the entries do not fit the columns");
        starts = block_starts(entry, this->places.size(), height());
    }

    size_t height() const { return targets.size(); }
};

template <class Value>
Value* maybe(const Optional& array) {
    return array ? data<Value>(*array) : nullptr;
}

// Calls run(the model's rows, its rule).
template <class Run>
void with_model(const Model& model, const Run& run) {
    with_type<float, double>(model.rows.dtype(), [&]<class Value>(Type<Value>) {
        const ModelRows<Value> rows{data<Value>(model.rows), model.stride()};
        const auto now = Value(model.now);
        if (model.adaptive && model.settles()) {
            run(rows, AdaptiveRegularised<Value>{{}, Value(model.l1), Value(model.l2), now});
        } else if (model.adaptive) {
            run(rows, Adaptive<Value>{});
        } else if (model.settles()) {
            run(rows, Truncated<Value>{model.scale, now});
        } else {
            run(rows, Scaled<Value>{model.scale});
        }
    });
}

size_t values_of(const Model& model) { return model.dimensions() * model.width; }

// Requires that the columns [first, last) of some increase, and lie in the model.
void check_columns(const Input& columns, size_t first, size_t last, size_t dimensions) {
    if (first == last) return;
    with_index(columns.dtype(), [&]<class Column>(Type<Column>) {
        const Column* at = data<Column>(columns);
        bool increasing = at[first] >= 0;
        for (size_t i = first + 1; i < last; ++i) increasing &= at[i - 1] < at[i];
        require(increasing && size_t(at[last - 1]) < dimensions,
                "columns must increase, and lie in the model");
    });
}

template <class Column, class Value>
BatchView<Column, Value> view(const Batch& batch) {
    return {data<Column>(batch.columns), data<Place>(batch.places), data<Value>(batch.values),
            batch.starts, batch.height()};
}

// Arranges rows in batches, which end at `bounds`. The arrays of a batch begin at the number of
// entries before it. Returns how many columns occur in each batch.
std::vector<size_t> by_columns(const Input& offsets, const Input& columns, const Input& values,
                               const std::vector<size_t>& bounds, const InOut& out_columns,
                               const InOut& out_places, const InOut& out_values, int threads) {
    const size_t batches = bounds.empty() ? 0 : bounds.size() - 1;
    require(batches > 0 && bounds.front() == 0 && bounds.back() + 1 == offsets.size() &&
                std::is_sorted(bounds.begin(), bounds.end()),
            "bounds must go from 0 to the number of rows");
    require(offsets.dtype() == dtype_of<int64_t>(), "offsets must be int64");
    require(columns.size() == values.size() && out_columns.dtype() == columns.dtype() &&
                out_values.dtype() == values.dtype() && out_places.dtype() == dtype_of<uint16_t>(),
            "the arrays of the batches must be like those of the rows");
    require(out_columns.size() >= columns.size() && out_places.size() >= columns.size() &&
                out_values.size() >= columns.size(),
            "the arrays of the batches are too short");
    const int64_t* const starts = data<int64_t>(offsets);
    require(starts[0] == 0 && std::is_sorted(starts, starts + offsets.size()) &&
                size_t(starts[offsets.size() - 1]) == columns.size(),
            "the offsets do not fit the entries");
    for (size_t batch = 0; batch < batches; ++batch) {
        const size_t first = bounds[batch], last = bounds[batch + 1];
        require(last - first <= kMostRows, "a batch has too many rows");
        require(starts[last] - starts[first] <= UINT32_MAX, "a batch has too many entries");
    }
    std::vector<size_t> counts(batches);
    with_index(columns.dtype(), [&]<class Column>(Type<Column>) {
        with_type<float, double>(values.dtype(), [&]<class Value>(Type<Value>) {
            nb::gil_scoped_release release;
            const Csr<Column, Value> source{starts, data<Column>(columns), data<Value>(values)};
            const size_t tasks = std::clamp<size_t>(size_t(std::max(threads, 1)), 1, batches);
            parallel(tasks, [&](size_t task) {
                ByColumns<Column, Value> sorter;
                const size_t end = split_point(batches, task + 1, tasks);
                for (size_t batch = split_point(batches, task, tasks); batch < end; ++batch) {
                    const auto at = starts[bounds[batch]];
                    counts[batch] = sorter.arrange(
                        source, bounds[batch], bounds[batch + 1],
                        {data<Column>(out_columns) + at, data<Place>(out_places) + at,
                         data<Value>(out_values) + at});
                }
            });
        });
    });
    return counts;
}

// Writes each row's derivative of the loss, and returns for each class the sum of the losses, then
// for each class the sum of the derivatives. `coordinates` are those at the batch's columns.
std::vector<double> differentiate_batch(const Batch& batch, const Input& coordinates,
                                        std::string_view loss, const std::vector<double>& intercept,
                                        const InOut& derivatives, int threads) {
    const size_t width = intercept.size(), height = batch.height();
    require(coordinates.dtype() == batch.values.dtype() &&
                coordinates.size() == batch.columns.size() * width &&
                derivatives.dtype() == batch.values.dtype() && derivatives.size() == height * width,
            "the coordinates and the derivatives must fit the batch");
    std::vector<double> totals(2 * width);
    bool known = false;
    with_index(batch.columns.dtype(), [&]<class Column>(Type<Column>) {
        with_type<float, double>(batch.values.dtype(), [&]<class Value>(Type<Value>) {
            nb::gil_scoped_release release;
            const auto columns = view<Column, Value>(batch);
            Buffer<Value> margins(columns.blocks() * height * width);
            with_width(width, [&](auto each) {
                add_margins(columns, data<Value>(coordinates), each, threads, margins.data());
            });
            const Targets<Value> targets{data<Value>(batch.targets),
                                         batch.weights ? data<Value>(*batch.weights) : nullptr};
            known = with_loss(loss, [&](auto function) {
                differentiate(function, margins.data(), columns.blocks(), height, width,
                              intercept.data(), targets, threads, data<Value>(derivatives),
                              totals.data());
            });
        });
    });
    require(known, "there is no loss of that name");
    return totals;
}

void batch_gradient(const Batch& batch, const Input& derivatives, size_t width, const InOut& out,
                    int threads) {
    require(derivatives.dtype() == batch.values.dtype() && out.dtype() == batch.values.dtype() &&
                derivatives.size() == batch.height() * width &&
                out.size() >= batch.columns.size() * width,
            "the derivatives and the gradient must fit the batch");
    with_index(batch.columns.dtype(), [&]<class Column>(Type<Column>) {
        with_type<float, double>(batch.values.dtype(), [&]<class Value>(Type<Value>) {
            nb::gil_scoped_release release;
            with_width(width, [&](auto each) {
                gradient(view<Column, Value>(batch), data<Value>(derivatives), each, threads,
                         data<Value>(out));
            });
        });
    });
}

// Calls run(what a step does to a row of the model).
template <class Run>
void with_step(const Model& model, double factor, double rate, const Optional& sums, double weight,
               const Run& run) {
    require(!sums || (sums->dtype() == model.rows.dtype() && sums->size() == values_of(model)),
            "sums must be like the model");
    require(!sums || model.l1 == 0, "sums are for models without L1");
    with_model(model, [&]<class Value, class Rule>(const ModelRows<Value>& rows, const Rule& rule) {
        run(Step<Value, Rule>{rows, rule, factor, rate, maybe<Value>(sums), weight});
    });
}

template <class Any>
using ValueOf = typename std::remove_cvref_t<Any>::Number;

void step_model(const Model& model, const std::optional<Input>& columns, const Input& values,
                double factor, double rate, const Optional& sums, double weight, int threads) {
    require(values.dtype() == model.rows.dtype() && values.size() % model.width == 0,
            "a gradient must be like the model");
    const size_t count = values.size() / model.width;
    require(columns ? columns->size() == count : count == model.dimensions(),
            "each column needs its gradient");
    if (columns) check_columns(*columns, 0, columns->size(), model.dimensions());
    with_step(model, factor, rate, sums, weight, [&](const auto& step) {
        const auto run = [&]<class Column>(const Column* at) {
            nb::gil_scoped_release release;
            with_width(model.width, [&](auto width) {
                take_step(at, data<ValueOf<decltype(step)>>(values), count, step, width, threads);
            });
        };
        if (!columns) return run(static_cast<const int32_t*>(nullptr));
        with_index(columns->dtype(),
                   [&]<class Column>(Type<Column>) { run(data<Column>(*columns)); });
    });
}

// Takes a step against the sum of gradients, each of which `tail` rows of other values follow.
void step_sum(const Model& model, const Input& columns, const std::vector<size_t>& bounds,
              const Input& values, size_t tail, const InOut& total, double factor, double rate,
              const Optional& sums, double weight, int threads) {
    require(bounds.size() > 1 && bounds.front() == 0 && bounds.back() == columns.size() &&
                std::is_sorted(bounds.begin(), bounds.end()),
            "bounds must go from 0 to the number of columns");
    require(values.dtype() == model.rows.dtype() &&
                values.size() == (columns.size() + tail * (bounds.size() - 1)) * model.width,
            "each column needs its gradient");
    require(total.dtype() == model.rows.dtype() && total.size() == values_of(model),
            "the total must be like the model");
    for (size_t g = 0; g + 1 < bounds.size(); ++g) {
        check_columns(columns, bounds[g], bounds[g + 1], model.dimensions());
    }
    with_step(model, factor, rate, sums, weight, [&](const auto& step) {
        with_index(columns.dtype(), [&]<class Column>(Type<Column>) {
            nb::gil_scoped_release release;
            const Gradients<Column, ValueOf<decltype(step)>> gradients{
                data<Column>(columns), data<ValueOf<decltype(step)>>(values), bounds, tail};
            with_width(model.width, [&](auto width) {
                take_step_of_sum(gradients, model.dimensions(), step, width, threads,
                                 data<ValueOf<decltype(step)>>(total));
            });
        });
    });
}

// Writes the coordinates at some columns, as they are once all regularisation is applied.
void read_at(const Model& model, const Input& columns, const InOut& out, int threads) {
    require(out.dtype() == model.rows.dtype() && out.size() == columns.size() * model.width,
            "the result must be like the model");
    with_index(columns.dtype(), [&]<class Column>(Type<Column>) {
        const Column* at = data<Column>(columns);
        bool inside = true;
        for (size_t i = 0; i < columns.size(); ++i) inside &= size_t(at[i]) < model.dimensions();
        require(inside, "a column lies outside of the model");
        with_model(model, [&]<class Value>(const ModelRows<Value>& rows, const auto& rule) {
            nb::gil_scoped_release release;
            with_width(model.width, [&](auto each) {
                read_coordinates(at, columns.size(), rows, rule, each, threads, data<Value>(out));
            });
        });
    });
}

// Writes what the coordinates are once all regularisation is applied, and leaves the model as is.
void read_model(const Model& model, const InOut& out) {
    require(out.dtype() == model.rows.dtype() && out.size() == values_of(model),
            "the result must be like the model");
    with_model(model, [&]<class Value>(const ModelRows<Value>& rows, const auto& rule) {
        nb::gil_scoped_release release;
        for (size_t row = 0; row < model.dimensions(); ++row) {
            for (size_t k = 0; k < model.width; ++k) {
                data<Value>(out)[row * model.width + k] =
                    rule.read(load<std::decay_t<decltype(rule)>>(rows.row(row), k, model.width));
            }
        }
    });
}

}  // namespace

void bind_linear(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<Model>(module, "LinearModel")
        .def(nb::init<InOut, size_t, bool, double, double>(), "rows"_a, "width"_a, "adaptive"_a,
             "l1"_a, "l2"_a)
        .def_rw("scale", &Model::scale)
        .def_rw("now", &Model::now)
        .def("step", step_model, "columns"_a.none(), "values"_a, "factor"_a, "rate"_a,
             "sums"_a.none(), "weight"_a, "threads"_a)
        .def("step_sum", step_sum, "columns"_a, "bounds"_a, "values"_a, "tail"_a, "total"_a,
             "factor"_a, "rate"_a, "sums"_a.none(), "weight"_a, "threads"_a)
        .def("read_at", read_at, "columns"_a, "out"_a, "threads"_a)
        .def("read", read_model, "out"_a);
    nb::class_<Batch>(module, "LinearBatch")
        .def(nb::init<Input, Input, Input, Input, std::optional<Input>>(), "columns"_a, "places"_a,
             "values"_a, "targets"_a, "weights"_a.none())
        .def("differentiate", differentiate_batch, "coordinates"_a, "loss"_a, "intercept"_a,
             "derivatives"_a, "threads"_a)
        .def("gradient", batch_gradient, "derivatives"_a, "width"_a, "out"_a, "threads"_a);
    module.def("by_columns", by_columns, "offsets"_a, "columns"_a, "values"_a, "bounds"_a,
               "out_columns"_a, "out_places"_a, "out_values"_a, "threads"_a);
}

}  // namespace sparcel
