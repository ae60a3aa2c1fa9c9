"""Named tensors in, updates out, all or nothing: what the drivers of all wrappers share."""

from sparcel.training.averager import Averager
from sparcel.training.handle import Handle, Stats
from sparcel.training.policy import Policy, stays_dense

__all__ = ["Averager", "Handle", "Policy", "Stats", "stays_dense"]
