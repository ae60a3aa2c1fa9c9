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

// What coordinate descent takes of a loss: its derivative, and the curvature of a parabola that
// touches the loss at the margin and lies nowhere below it. `kCurvature` bounds that of all
// margins.
struct Slope {
    double derivative, curvature;
};

// The target is 1 or -1, or any number where the loss is squared.
struct Logistic {
    static Loss at(double margin, double target) {
        const double yz = margin * target;
        const double e = std::exp(-std::abs(yz));
        const double share = yz > 0 ? e / (1 + e) : 1 / (1 + e);  // 1 / (1 + exp(yz))
        return {std::log1p(e) + std::max(-yz, 0.0), -target * share};
    }

    // The least curvature that such a parabola can have: tanh(yz / 2) / (2 yz). It is the bound
    // of Jaakkola and Jordan (Statistics and Computing 10, 2000).
    static Slope slope(double margin, double target) {
        const double yz = margin * target, share = 1 / (1 + std::exp(yz));
        return {-target * share, std::abs(yz) > 1e-3 ? (0.5 - share) / yz : kCurvature};
    }
    static constexpr double kCurvature = 0.25;
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
    static Slope slope(double margin, double target) {
        return {at(margin, target).derivative, kCurvature};
    }
    static constexpr double kCurvature = 2;
};

struct Squared {
    static Loss at(double margin, double target) {
        const double error = margin - target;
        return {error * error / 2, error};
    }
    static Slope slope(double margin, double target) { return {margin - target, kCurvature}; }
    static constexpr double kCurvature = 1;
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

// The same for losses that have a curvature everywhere.
template <class Run>
bool with_smooth_loss(std::string_view name, const Run& run) {
    return name != "hinge" && with_loss(name, [&]<class L>(L loss) {
               if constexpr (!std::is_same_v<L, Hinge>) run(loss);
           });
}

}  // namespace sparcel
