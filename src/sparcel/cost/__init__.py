"""What sums and steps cost, before they are run: by the steps they consist of, and measured rates.

`predict` follows the steps of a collective or a scheme and adds up their times, by `Rates`: tables
that `measure` makes on the ranks of a communicator.
"""

from sparcel.cost.defaults import default_rates, stated_rates
from sparcel.cost.measure import measure, rates_for, read_rates
from sparcel.cost.predict import Counts, Prediction, choose, count, predict, work_seconds
from sparcel.rates import Curve, Rates
from sparcel.schedule import Problem

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
