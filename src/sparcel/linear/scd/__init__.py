"""Random block coordinate descent, and how ranks share derivatives."""

from sparcel.linear.scd.solver import Scd

__all__ = ["Scd"]
