"""Outer steps: islands train alone, and exchange what their parameters have moved now and then."""

from sparcel.products.outer import *
from sparcel.products.outer import __all__ as __all__
