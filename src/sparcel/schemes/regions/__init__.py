"""Two exchanges: what ranks send of each region to its owner, and what the owners return."""

from sparcel.schemes.regions.exchange import Returned, exchange_regions, stages
from sparcel.schemes.regions.layout import Phase, Regions, Shares, phase

__all__ = ["Phase", "Regions", "Returned", "Shares", "exchange_regions", "phase", "stages"]
