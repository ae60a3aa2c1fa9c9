"""Two exchanges: what ranks send of each region to its owner, and what the owners return."""

from sparcel.kernels import Phase, Regions, Shares
from sparcel.regions.exchange import exchange_regions, phase, stages

__all__ = ["Phase", "Regions", "Shares", "exchange_regions", "phase", "stages"]
