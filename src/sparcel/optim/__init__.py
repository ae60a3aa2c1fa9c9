"""Optimisers: for updates that are streams, and for large batches, whose layers have own rates."""

from sparcel.optim.lamb import LAMB
from sparcel.optim.lars import LARS
from sparcel.optim.parallel import parallel
from sparcel.optim.sgd import SGD

__all__ = ["LAMB", "LARS", "SGD", "parallel"]
