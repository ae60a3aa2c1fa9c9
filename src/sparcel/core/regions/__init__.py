"""Two exchanges: what ranks send of each region to its owner, and what the owners return."""

from sparcel.core.kernels import Densities, Leg, Regions
from sparcel.core.regions.exchange import RETURNED, compiled_bits, exchange_regions, leg

__all__ = ["RETURNED", "Densities", "Leg", "Regions", "compiled_bits", "exchange_regions", "leg"]
