// Losses of linear models: their values, and their derivatives by the margin.
#pragma once

#include <algorithm>
#include <cmath>
#include <string_view>
#include <type_traits>

namespace sparcel {

struct Loss {
    double value, derivative;
};

// The target is 1 or -1, or any number where the loss is squared.
struct Logistic {
    static Loss at(double margin, double target) {
        const double yz = margin * target;
        const double e = std::exp(-std::abs(yz));
        const double share = yz > 0 ? e / (1 + e) : 1 / (1 + e);  // 1 / (1 + exp(yz))
        return {std::log1p(e) + std::max(-yz, 0.0), -target * share};
    }
};

struct Hinge {
    static Loss at(double margin, double target) {
        const double lacking = 1 - margin * target;
        return lacking > 0 ? Loss{lacking, -target} : Loss{0, 0};
    }
};

struct SquaredHinge {
    static Loss at(double margin, double target) {
        const double lacking = std::max(1 - margin * target, 0.0);
        return {lacking * lacking, -2 * target * lacking};
    }
};

struct Squared {
    static Loss at(double margin, double target) {
        const double error = margin - target;
        return {error * error / 2, error};
    }
};

// Calls run(a loss) with the loss of that name; false if there is none.
template <class Run>
bool with_loss(std::string_view name, const Run& run) {
    if (name == "logistic") return run(Logistic()), true;
    if (name == "hinge") return run(Hinge()), true;
    if (name == "squared_hinge") return run(SquaredHinge()), true;
    if (name == "squared") return run(Squared()), true;
    return false;
}

}  // namespace sparcel
