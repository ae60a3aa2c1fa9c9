"""A part of a training: its scheme, its rule for the learning rate, and what its loader needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from sparcel._checks import number, whole_number
from sparcel.errors import InputError
from sparcel.schemes import Scheme, chosen_scheme

Rate = float | tuple[float, float] | Callable[[float], float]
"""A rule for the learning rate: the rate, its first and last value, or a function of progress."""


@dataclass(frozen=True)
class Phase:
    """A part of a training with one scheme, resolution and batch size, and one rule for the rate.

    Parameters
    ----------
    length
        How long it lasts, more than 0, in the unit that the training counts in: epochs or steps.
    scheme
        A name that `sparcel.scheme` knows, or a scheme that it made.
    lr
        The learning rate: a number; a pair, from the first to the second in equal steps; or a
        function of the progress in [0, 1) of the phase.
    resolution, batch_size
        For the loader, which may ignore them: the side of the images in pixels, and the samples of
        a step on one rank. None if the schedule does not say.

    Raises
    ------
    InputError
        For a length, rate, resolution or batch size out of range, or an unknown scheme.
    """

    length: float
    scheme: Scheme | str
    _: KW_ONLY
    lr: Rate
    resolution: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        # An infinite length or rate has no limit of its own to break.
        length = number(self.length, "length", above=0, below=math.inf)
        object.__setattr__(self, "length", int(length) if length.is_integer() else length)
        object.__setattr__(self, "scheme", chosen_scheme(self.scheme, {}))
        if isinstance(self.lr, tuple | list):
            if len(self.lr) != 2:
                raise InputError(
                    f"a pair of rates is the first and the last of the phase, got {self.lr}"
                )
            object.__setattr__(self, "lr", tuple(_rate(one, "lr") for one in self.lr))
        elif not callable(self.lr):
            object.__setattr__(self, "lr", _rate(self.lr, "lr"))
        for name in ("resolution", "batch_size"):
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(size, name, at_least=1))

    def rate(self, progress: float) -> float:
        """Return the learning rate at a progress in [0, 1)."""
        if callable(self.lr):
            return _rate(self.lr(progress), f"lr({progress:g})")
        if isinstance(self.lr, tuple):
            first, last = self.lr
            return first + (last - first) * progress
        return self.lr


def _rate(value: object, name: str) -> float:
    return number(value, name, at_least=0, below=math.inf)
