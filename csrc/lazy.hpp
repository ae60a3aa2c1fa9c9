// Coordinates of a linear model, regularised when they are looked at and not in every step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace sparcel {

inline double truncated(double x, double by) {
    return std::copysign(std::max(std::abs(x) - by, 0.0), x);
}

// A model's numbers, row by row: a row holds what belongs to one coordinate, so that a visit takes
// one access to memory. It begins with the values of the classes.
template <class Value>
struct ModelRows {
    Value* first;
    size_t stride;  // numbers a row

    Value* row(size_t at) const { return first + at * stride; }
    void fetch(size_t at) const { __builtin_prefetch(row(at), 1); }
};

// Without L1 all coordinates shrink alike, by one scale: a coordinate is scale · its number.
template <class Value>
struct Scaled {
    double scale;

    double read(const Value* row, size_t k, size_t) const { return double(row[k]) * scale; }
    void step(Value* row, size_t k, size_t, double gradient, double rate) const {
        row[k] -= Value(rate / scale * gradient);
    }
    void settle(Value*, size_t) const {}
};

// With L1 every step also lowers the magnitudes. `now` is the sum of what the steps so far took off
// the numbers; a row ends with what it was when the row was last written.
template <class Value>
struct Truncated {
    double scale;
    Value now;

    double lowered(const Value* row, size_t k, size_t width) const {
        return truncated(double(row[k]), double(now) - double(row[width]));
    }
    double read(const Value* row, size_t k, size_t width) const {
        return lowered(row, k, width) * scale;
    }
    void step(Value* row, size_t k, size_t, double gradient, double rate) const {
        row[k] -= Value(rate / scale * gradient);
    }
    void settle(Value* row, size_t width) const {
        for (size_t k = 0; k < width; ++k) row[k] = Value(lowered(row, k, width));
        row[width] = now;
    }
};

// AdaGrad: a coordinate's steps, its regularisation among them, are divided by the root of the sum
// of its squared gradients, which follow the coordinates in a row. Between two gradients that root
// stays, and a coordinate follows w' = -(l2 · w + l1 · sign(w)) / root.
template <class Value>
struct Adaptive {
    static constexpr double kLeast = 1e-7;  // above what summing in float32 makes of zero

    static Value root(const Value* row, size_t k, size_t width) {
        return std::sqrt(row[width + k]) + Value(kLeast);
    }
    Value read(const Value* row, size_t k, size_t) const { return row[k]; }
    void step(Value* row, size_t k, size_t width, Value gradient, Value rate) const {
        row[width + k] += gradient * gradient;
        row[k] -= rate * gradient / root(row, k, width);
    }
    void settle(Value*, size_t) const {}
};

// AdaGrad with regularisation. `now` is the sum of the step sizes so far; a row ends with what it
// was when the row was last written. What is owed since then is made up for by one proximal step of
// that length.
template <class Value>
struct AdaptiveRegularised : Adaptive<Value> {
    Value l1, l2, now;

    Value read(const Value* row, size_t k, size_t width) const {
        const Value root = this->root(row, k, width), length = now - row[2 * width];
        const Value magnitude = std::max(std::abs(row[k]) * root - l1 * length, Value(0));
        return std::copysign(magnitude / (root + l2 * length), row[k]);
    }
    void settle(Value* row, size_t width) const {
        for (size_t k = 0; k < width; ++k) row[k] = read(row, k, width);
        row[2 * width] = now;
    }
};

}  // namespace sparcel
