"""Prediction of the cost of all-reduces and training steps, from formulas and measured rates.

`predict` adds up the times of what a collective or a scheme sends and computes, which its formula
tells: `SUMS` and `STEPS`. The times come from `Rates`: tables that `measure` fills on the ranks of
a communicator.
"""

from sparcel.core.cost.defaults import default_rates, stated_rates
from sparcel.core.cost.formulas import COLLECTIVES, SUMS
from sparcel.core.cost.measure import measure, rates_for, read_rates
from sparcel.core.cost.predict import (
    Counts,
    Prediction,
    Problem,
    choose,
    count,
    predict,
    work_seconds,
)
from sparcel.core.cost.steps import STEPS
from sparcel.core.rates import Curve, Rates

__all__ = [
    "COLLECTIVES",
    "STEPS",
    "SUMS",
    "Counts",
    "Curve",
    "Prediction",
    "Problem",
    "Rates",
    "choose",
    "count",
    "default_rates",
    "measure",
    "predict",
    "rates_for",
    "read_rates",
    "stated_rates",
    "work_seconds",
]
