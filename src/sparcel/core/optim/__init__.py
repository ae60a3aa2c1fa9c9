"""Optimisers: for updates that are streams, and for large batches, whose layers have own rates."""

from sparcel.core.optim.optimizers import LAMB, LARS, SGD
from sparcel.core.optim.parallel import parallel
from sparcel.core.optim.two_steps import (
    SaysTwoSteps,
    adam_two_steps,
    is_muon,
    muon_two_steps,
    sgd_two_steps,
)

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "SaysTwoSteps",
    "adam_two_steps",
    "is_muon",
    "muon_two_steps",
    "parallel",
    "sgd_two_steps",
]
