"""Prediction of the cost of all-reduces and training steps, from formulas and measured rates."""

from sparcel.core.cost import *
from sparcel.core.cost import __all__ as __all__
