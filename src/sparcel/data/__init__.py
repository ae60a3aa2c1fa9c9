"""Reading samples once: a cache on the node's disk and in its memory, and samplers for it."""

from sparcel.data.cached import Cached, CacheStats
from sparcel.data.sampler import PartSampler

__all__ = ["CacheStats", "Cached", "PartSampler"]
