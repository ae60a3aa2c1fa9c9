"""Densities: how many coordinates they stand for, and checks of their values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparcel.core._checks import checked_number, checked_whole
from sparcel.core.units import share_of
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
        steps = checked_whole(steps, "warmup_steps", at_least=1)
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
    share = checked_number(density, name)
    hint = f"for a percentage pass density={share / 100:g}" if 1 < share <= 100 else ""
    return checked_number(density, name, above=0, at_most=1, hint=hint)


WAITING = 7.0
"""With it, `front_loaded` sends three times as much if each coordinate would be sent ten times."""

MOST_FOR_WAITING = 0.1
"""The density that `WAITING` raises others to, at most."""

EARLY = 200.0
"""The steps in which a training's gradients change most."""

ALMOST_ALL = 0.25
"""From this density on a step sends everything instead, for few more bytes and less work."""


def front_loaded(density: float, step: int) -> float:
    """Return a density that is higher in the first steps of a training, and falls to ``density``.

    The largest of three in step ``s``, which is counted from 1 and rounded down to a power of two:

    - ``density``;
    - ``density·200 / s``, because gradients change most in the first steps; from 25 % on it is 1,
      because a step that sends everything neither selects nor merges;
    - ``density·(1 + √(7 / (density·s)))``, but at most 10 %, because a coordinate that waits as
      many steps as a training has is never sent.

    At ``density=0.1``: 1 in the first 127 steps, 16 % after those, 10 % from step 256 on. At
    ``density=0.01``: 1 in the first 15 steps, 4 % after a hundred, 2 % after a thousand. Over a
    training of T steps the mean is at most ``1 + 2.5·√(7 / (density·T)) + 1320 / T`` times the
    density.
    """
    begun = 1 << ((step + 1).bit_length() - 1)
    early = density * EARLY / begun
    if early >= ALMOST_ALL:
        return 1.0
    waiting = min(MOST_FOR_WAITING, density * (1 + math.sqrt(WAITING / (density * begun))))
    return max(density, early, waiting)


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
    return max(1, share_of(density, size))
