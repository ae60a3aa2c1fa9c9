"""What sums and steps cost, before they are run: by the steps they consist of, and measured rates.

`predict` follows the steps that a collective takes and adds up their times, which `Rates` tells:
tables that `measure` makes on the ranks of a communicator.
"""

from sparcel.cost.defaults import default_rates, stated_rates
from sparcel.cost.measure import measure
from sparcel.cost.predict import LOSSLESS, NAMES, Prediction, choose, predict
from sparcel.cost.problem import Problem
from sparcel.cost.rates import Curve, Rates

__all__ = [
    "LOSSLESS",
    "NAMES",
    "Curve",
    "Prediction",
    "Problem",
    "Rates",
    "choose",
    "default_rates",
    "measure",
    "predict",
    "stated_rates",
]
