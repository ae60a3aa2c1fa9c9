"""Optimisers: for updates that are streams, and for large batches, whose layers have own rates."""

from sparcel.core.optim import *
from sparcel.core.optim import __all__ as __all__
