// Coordinates of a linear model, regularised when they are looked at and not in every step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace sparcel {

inline double truncated(double x, double by) {
    return std::copysign(std::max(std::abs(x) - by, 0.0), x);
}

// What a model remembers of a coordinate, as far as its rule needs it.
template <class Value>
struct Coordinate {
    Value value;
    Value squares;  // the sum of its squared gradients, with AdaGrad
    Value since;    // what the rule's `now` was when it was last written, with regularisation
};

// A model's numbers, row by row: a row holds what belongs to one coordinate, so that a visit takes
// one access to memory. It has the values of the classes, their squares, and one `since`.
template <class Value>
struct ModelRows {
    Value* first;
    size_t stride;  // numbers a row

    Value* row(size_t at) const { return first + at * stride; }
    void fetch(size_t at) const { __builtin_prefetch(row(at), 1); }
};

template <class Rule, class Value>
Coordinate<Value> load(const Value* row, size_t k, size_t width) {
    return {row[k], Rule::kAdaptive ? row[width + k] : Value(0),
            Rule::kSettles ? row[(1 + Rule::kAdaptive) * width] : Value(0)};
}

// Writes all but `since`, which the classes share.
template <class Rule, class Value>
void store(const Coordinate<Value>& coordinate, Value* row, size_t k, size_t width) {
    row[k] = coordinate.value;
    if constexpr (Rule::kAdaptive) row[width + k] = coordinate.squares;
}

template <class Rule, class Value>
void mark(const Rule& rule, Value* row, size_t width) {
    if constexpr (Rule::kSettles) row[(1 + Rule::kAdaptive) * width] = rule.now;
}

// A rule has these functions: `settled`, the value once all regularisation is applied; `read`, the
// model's coordinate then; and `step`, which changes a settled value.

// Without L1 all coordinates shrink alike, by one scale: a coordinate is scale · its number.
template <class Value>
struct Scaled {
    static constexpr bool kAdaptive = false, kSettles = false;
    double scale;

    Value settled(const Coordinate<Value>& at) const { return at.value; }
    Value read(const Coordinate<Value>& at) const { return Value(double(at.value) * scale); }
    void step(Coordinate<Value>& at, Value gradient, double rate) const {
        at.value -= Value(rate / scale * gradient);
    }
};

// With L1 every step also lowers the magnitudes. `now` is the sum of what the steps so far took off
// the numbers.
template <class Value>
struct Truncated {
    static constexpr bool kAdaptive = false, kSettles = true;
    double scale;
    Value now;

    double lowered(const Coordinate<Value>& at) const {
        return truncated(double(at.value), double(now) - double(at.since));
    }
    Value settled(const Coordinate<Value>& at) const { return Value(lowered(at)); }
    Value read(const Coordinate<Value>& at) const { return Value(lowered(at) * scale); }
    void step(Coordinate<Value>& at, Value gradient, double rate) const {
        at.value -= Value(rate / scale * gradient);
    }
};

// AdaGrad: a coordinate's steps, its regularisation among them, are divided by the root of the sum
// of its squared gradients. Between two gradients that root stays, and a coordinate follows
// w' = -(l2 · w + l1 · sign(w)) / root.
template <class Value>
struct Adaptive {
    static constexpr bool kAdaptive = true, kSettles = false;
    static constexpr double kLeast = 1e-7;  // above what summing in float32 makes of zero

    static Value root(const Coordinate<Value>& at) { return std::sqrt(at.squares) + Value(kLeast); }
    Value settled(const Coordinate<Value>& at) const { return at.value; }
    Value read(const Coordinate<Value>& at) const { return at.value; }
    void step(Coordinate<Value>& at, Value gradient, Value rate) const {
        at.squares += gradient * gradient;
        at.value -= rate * gradient / root(at);
    }
};

// AdaGrad with regularisation. `now` is the sum of the step sizes so far. What is owed since a row
// was last written is made up for by one proximal step of that length.
template <class Value>
struct AdaptiveRegularised : Adaptive<Value> {
    static constexpr bool kSettles = true;
    Value l1, l2, now;

    Value settled(const Coordinate<Value>& at) const {
        const Value root = this->root(at), length = now - at.since;
        const Value magnitude = std::max(std::abs(at.value) * root - l1 * length, Value(0));
        return std::copysign(magnitude / (root + l2 * length), at.value);
    }
    Value read(const Coordinate<Value>& at) const { return settled(at); }

    // By what the sum for an average grows while a coordinate settles: now · (its value then) -
    // since · (its value before) - what it was after each step, times the step's length `rate`.
    // Without L1; the sum over steps is the integral and, as Euler and Maclaurin say, half a step's
    // change.
    double passed(const Coordinate<Value>& at, double rate) const {
        const double root = this->root(at), length = double(now) - double(at.since);
        const double integral = double(at.value) * root / l2 * std::log1p(l2 * length / root);
        const double after = settled(at), sum = integral + rate / 2 * (after - at.value);
        return double(now) * after - double(at.since) * at.value - sum;
    }
};

}  // namespace sparcel
