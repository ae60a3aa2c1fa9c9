"""Reading samples once: a cache on the node's disk and in its memory, and samplers for it."""

from sparcel.products.data import *
from sparcel.products.data import __all__ as __all__
