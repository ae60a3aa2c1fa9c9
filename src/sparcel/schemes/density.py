"""Densities: how many coordinates they stand for, and checks of their values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparcel.errors import InputError


def check_schedule(densities: Sequence[float], steps: int | None) -> None:
    """Raise `InputError` unless these are densities and each lasts at least one step."""
    if not isinstance(densities, Sequence):
        raise InputError(f"warmup must be a list of densities, got {densities!r}")
    for density in densities:
        check_density(density)
    if densities and not (isinstance(steps, int) and steps >= 1):
        raise InputError(
            f"warmup={list(densities)} needs warmup_steps, the steps that each density lasts, got"
            f" {steps}; for one epoch each pass warmup_steps=len(loader)"
        )


def check_density(density: float) -> None:
    """Raise `InputError` unless ``density`` lies in (0, 1]."""
    if not 0 < density <= 1:
        percentage = 1 < density <= 100
        hint = f"; for a percentage pass density={density / 100:g}" if percentage else ""
        raise InputError(f"density must lie in (0, 1], got {density:g}{hint}")


def count_for(density: float, size: int) -> int:
    """Return how many of ``size`` coordinates a density asks for: max(1, ⌈density·n⌉)."""
    return max(1, math.ceil(density * size))
