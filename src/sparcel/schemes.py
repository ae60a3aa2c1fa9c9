"""Schemes: turn each rank's gradient into one update, the same on all ranks; made by name."""

from sparcel.core.schemes import *
from sparcel.core.schemes import __all__ as __all__
