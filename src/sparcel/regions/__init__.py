"""Two exchanges: what ranks send of each region to its owner, and what the owners return."""

from sparcel.regions.exchange import exchange_regions, stages
from sparcel.regions.layout import Phase, Regions, Shares, phase

__all__ = ["Phase", "Regions", "Shares", "exchange_regions", "phase", "stages"]
