"""Prediction of the cost of all-reduces and training steps, from their stages and measured rates.

`predict` adds up the times of the stages of a collective or a scheme. The times come from `Rates`:
tables that `measure` fills on the ranks of a communicator.
"""

from sparcel.cost.defaults import default_rates, stated_rates
from sparcel.cost.measure import measure, rates_for, read_rates
from sparcel.cost.predict import Counts, Prediction, choose, count, predict, work_seconds
from sparcel.rates import Curve, Rates
from sparcel.stages import Problem

__all__ = [
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
