"""Sparse gradient exchange for DistributedDataParallel: one line in an existing script."""

from sparcel.ddp.attach import attach
from sparcel.training import Handle, Stats, stays_dense

__all__ = ["Handle", "Stats", "attach", "stays_dense"]
