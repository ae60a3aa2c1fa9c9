"""Reading samples once: a cache on the node's disk and in its memory, and samplers for it."""

from sparcel.products.data.cached import Cached, CacheStats, PartSampler

__all__ = ["CacheStats", "Cached", "PartSampler"]
