"""Sparse gradient exchange for DistributedDataParallel: one line in an existing script."""

from sparcel.ddp.attach import attach
from sparcel.ddp.handle import Handle, Stats
from sparcel.ddp.policy import stays_dense

__all__ = ["Handle", "Stats", "attach", "stays_dense"]
