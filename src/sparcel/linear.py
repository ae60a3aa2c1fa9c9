"""Linear models on high-dimensional sparse rows, fitted by one process or many."""

from sparcel.products.linear import *
from sparcel.products.linear import __all__ as __all__
