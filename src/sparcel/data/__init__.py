"""Reading samples once: a cache on the node's disk and in its memory, and samplers for it."""

from sparcel.data.cached import Cached, Stats
from sparcel.data.sampler import PartSampler

__all__ = ["Cached", "PartSampler", "Stats"]
