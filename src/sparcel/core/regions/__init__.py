"""Two exchanges: what ranks send of each region to its owner, and what the owners return."""

from sparcel.core.kernels import Phase, Regions, Shares
from sparcel.core.regions.exchange import RETURNED, exchange_regions, few_bits, phase

__all__ = ["RETURNED", "Phase", "Regions", "Shares", "exchange_regions", "few_bits", "phase"]
