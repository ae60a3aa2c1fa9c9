"""When outer steps are due, and how much each island counts in them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from sparcel._checks import checked_number, checked_whole
from sparcel.errors import InputError, warn


class Pace:
    """When an outer step of the next fragment is due.

    Parameters
    ----------
    every
        After how many inner steps each parameter is exchanged, or after how many seconds: "60s".
    fragments
        How many fragments take turns.
    overlap
        How many inner steps go on while a fragment is exchanged.

    Raises
    ------
    InputError
        When the pace is none, or exchanges would overlap one another.
    """

    def __init__(self, every: int | str, fragments: int, overlap: int) -> None:
        self._fragments, self._seconds, self._steps = fragments, 0.0, 1
        if isinstance(every, str):
            found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?s", every)
            if found is None:
                raise InputError(
                    f'every must be a number of steps, or such as "60s", got {every!r}'
                )
            self._seconds = checked_number(float(found[1]), "the seconds of every", above=0)
        else:
            self._steps = checked_whole(every, "every", 1)
            if overlap >= max(1, self._steps // fragments):
                raise InputError(
                    f"overlap must be less than the inner steps between exchanges, got {overlap}"
                    f" with every={every} and {fragments} fragments"
                )
        self.begin()

    def begin(self) -> None:
        """Count seconds from now on: an outer step has ended."""
        self._since = time.monotonic()

    @property
    def goes_by_time(self) -> bool:
        """Whether seconds count, and not inner steps."""
        return self._seconds > 0

    def due(self, steps: int) -> int:
        """Return after how many inner steps so many outer steps are due."""
        return -(-steps * self._steps // self._fragments)

    def is_due(self, clock: int, steps: int) -> bool:
        """Tell whether one is due after so many inner steps, and outer steps."""
        if self.goes_by_time:
            return time.monotonic() - self._since >= self._seconds / self._fragments
        return clock >= self.due(steps + 1)


class Weights:
    """How much this island has learned from, by which islands count in the average.

    Parameters
    ----------
    fragments
        How many fragments take turns.
    """

    def __init__(self, fragments: int) -> None:
        self._counted = math.nan
        """What it was told in all; NaN if it was told nothing."""
        self._marks = [0.0] * fragments
        """What of it was counted when each fragment was exchanged last."""
        self._moved = math.nan
        self._has_warned = False

    def count(self, amount: float) -> None:
        """Add what this island has learned from."""
        amount = checked_number(amount, "what an island has learned from", at_least=0)
        self._counted = amount + (0.0 if math.isnan(self._counted) else self._counted)

    def move(self, fragment: int) -> float:
        """Return what it has learned from since a fragment was exchanged; NaN if unknown."""
        self._moved = self._counted
        return self._counted - self._marks[fragment]

    def step(self, fragment: int) -> None:
        """Begin anew with a fragment that was exchanged as it was at the last `move`."""
        if not math.isnan(self._moved):
            self._marks[fragment] = self._moved

    def forget(self) -> None:
        """Begin anew with all fragments."""
        if not math.isnan(self._counted):
            self._marks = [self._counted] * len(self._marks)

    def share(self, told: Sequence[float], own: float) -> float:
        """Return by what this island's pseudo-gradient is multiplied before the average.

        Parameters
        ----------
        told
            What the islands that count have learned from.
        own
            What this one has.
        """
        total = sum(told)
        if math.isnan(total):
            if not self._has_warned and not all(map(math.isnan, told)):
                self._has_warned = True
                warn(
                    "some islands have told by count() what they have learned from, and others have"
                    " not: all count alike"
                )
            return 1.0
        return own * len(told) / total if total else 1.0

    @property
    def state(self) -> Tensor:
        """What it has learned from since each fragment was exchanged, float64 ``[fragments]``."""
        return torch.tensor([self._counted - mark for mark in self._marks], dtype=torch.float64)

    @state.setter
    def state(self, state: Tensor) -> None:
        waiting = state.tolist()
        self._counted = math.nan if any(map(math.isnan, waiting)) else 0.0
        self._marks = [0.0 if math.isnan(one) else -one for one in waiting]
