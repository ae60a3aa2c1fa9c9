"""Selectors: which coordinates of a dense vector go into a stream."""

from sparcel.core.selectors import *
from sparcel.core.selectors import __all__ as __all__
