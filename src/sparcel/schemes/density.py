"""Densities: how many coordinates they stand for, and checks of their values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparcel._checks import number, whole_number
from sparcel.errors import InputError


def checked_schedule(
    densities: Sequence[float], steps: int | None
) -> tuple[tuple[float, ...], int | None]:
    """Return the densities of the warm-up and the steps of each, or raise `InputError`."""
    if isinstance(densities, str) or not isinstance(densities, Sequence):
        raise InputError(f"warmup must be a list of densities, got {densities!r}")
    checked = tuple(
        checked_density(density, f"warmup[{place}]") for place, density in enumerate(densities)
    )
    if steps is not None:
        steps = whole_number(steps, "warmup_steps", at_least=1)
    elif checked:
        raise InputError(
            f"warmup={list(checked)} needs warmup_steps, the optimiser steps that each density"
            " lasts; for one epoch each pass warmup_steps=len(loader), divided by the batches that"
            " a step accumulates"
        )
    if steps is not None and not checked:
        raise InputError(
            f"warmup_steps={steps} needs warmup, the densities of the first steps; for an"
            " uncompressed epoch pass warmup=[1], warmup_steps=len(loader)"
        )
    return checked, steps


def checked_density(density: float, name: str = "density") -> float:
    """Return ``density`` as a float in (0, 1], or raise an `InputError` that names it."""
    share = number(density, name)
    hint = f"for a percentage pass density={share / 100:g}" if 1 < share <= 100 else ""
    return number(density, name, above=0, at_most=1, hint=hint)


FRONT = 7.0
"""With it, `front_loaded` sends three times as much if each coordinate would be sent ten times."""

MOST_IN_FRONT = 0.1
"""The density that `front_loaded` raises others to, at most."""


def front_loaded(density: float, step: int) -> float:
    """Return a density that is higher in the first steps of a training, and falls to ``density``.

    ``density·(1 + √(7 / (density·s)))``, but at most 10 %, where ``s`` is the step counted from 1,
    rounded down to a power of two. At ``density=0.01``: 10 % in the first steps, 4 % after a
    hundred, 2 % after a thousand; from 10 % on no more than ``density``. Over a training of T steps
    its mean is at most ``1 + 2.5·√(7 / (density·T))`` times the density: 3 times if the training
    sends each coordinate 10 times, 1.7 times at a hundred.
    """
    begun = 1 << ((step + 1).bit_length() - 1)
    raised = density * (1 + math.sqrt(FRONT / (density * begun)))
    return max(density, min(MOST_IN_FRONT, raised))


def front_loaded_shares(density: float, steps: int) -> dict[float, float]:
    """Return the densities that `front_loaded` gives in a training, each with its share of steps.

    There are few, because the density only changes at powers of two.
    """
    shares: dict[float, float] = {}
    for begun in (1 << power for power in range(steps.bit_length())):
        shown = front_loaded(density, begun - 1)
        shares[shown] = shares.get(shown, 0.0) + min(begun, steps + 1 - begun) / steps
    return shares


def count_for(density: float, size: int) -> int:
    """Return how many of ``size`` coordinates a density asks for: max(1, ⌈density·n⌉)."""
    return max(1, math.ceil(density * size))
