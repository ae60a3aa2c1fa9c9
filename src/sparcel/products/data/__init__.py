"""Reading samples once: a cache on the node's disk and in its memory, and samplers for it."""

from sparcel.products.data.cached import Cached, CacheStats
from sparcel.products.data.sampler import PartSampler

__all__ = ["CacheStats", "Cached", "PartSampler"]
