"""Two exchanges: what ranks send of each region to its owner, and what the owners return."""

from sparcel.core.kernels import Densities, Leg, Regions
from sparcel.core.regions.exchange import RETURNED, exchange_regions, few_bits, leg

__all__ = ["RETURNED", "Densities", "Leg", "Regions", "exchange_regions", "few_bits", "leg"]
