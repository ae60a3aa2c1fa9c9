"""Analysis of sparse training: the fill-in of sums, and the similarity of ranks."""

from sparcel.tools.analysis import *
from sparcel.tools.analysis import __all__ as __all__
