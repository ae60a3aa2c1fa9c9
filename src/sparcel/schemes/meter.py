"""What a step costs a rank: counted, timed, and named in profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from sparcel.profiling import profiled


@dataclass
class Meter:
    """Counters and times of this rank, summed over steps.

    ``coordinates`` counts those of the whole vectors, ``asked`` those that the density asks for,
    ``selected`` those that this rank sent, and ``reduced`` those of the sums. ``magnitude`` is the
    sum of |x| over what left this rank's memory, less that over what came back to it or arrived.
    On a GPU it stays there.
    ``flushed`` is that part of it that a switch of the scheme made leave.
    ``dense_bytes`` are what a dense exchange would have sent; the driver of the step counts them.
    """

    coordinates: int = 0
    asked: int = 0
    selected: int = 0
    reduced: int = 0
    magnitude: float | Tensor = 0.0
    flushed: float = 0.0
    dense_bytes: int = 0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0

    def count_whole(self, coordinates: int) -> None:
        """Add coordinates that all ranks send whole."""
        self.coordinates += coordinates
        self.asked += coordinates
        self.selected += coordinates
        self.reduced += coordinates

    def count_flushed(self, magnitude: float) -> None:
        """Add a magnitude that left memory because the scheme was switched."""
        self.flushed += magnitude
        self.magnitude += magnitude

    def selecting(self) -> AbstractContextManager[None]:
        """Add the time of the block to ``select_seconds``; profiles show it as a range."""
        return _Block(self, "select_seconds", "select")

    def communicating(self) -> AbstractContextManager[None]:
        """Add the time of the block to ``communicate_seconds``; profiles show it as a range."""
        return _Block(self, "communicate_seconds", "exchange")


class _Block(AbstractContextManager[None]):
    """A block whose time is added to one of a meter's times, unless it raises."""

    __slots__ = ("_meter", "_profiled", "_start", "_time")

    def __init__(self, meter: Meter, time: str, name: str) -> None:
        self._meter, self._time, self._profiled = meter, time, profiled(name)

    def __enter__(self) -> None:
        self._start = perf_counter()
        self._profiled.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profiled.__exit__(*error)
        if error[0] is None:
            spent = perf_counter() - self._start
            setattr(self._meter, self._time, getattr(self._meter, self._time) + spent)
