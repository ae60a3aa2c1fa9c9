"""A driver's settings for one step: layers, ranges to leave out, the divisor, and the meter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from sparcel.comm import Communicator
from sparcel.formats import COO, Format
from sparcel.memory import Range

Layer = tuple[int, int, float | None]
"""``(start, stop, density)``: consecutive coordinates with a density of their own. None stands for
the scheme's density."""


@dataclass
class Meter:
    """Counters and times of this rank, summed over steps.

    ``asked`` counts the coordinates that the density asks for, ``selected`` the coordinates that
    this rank sent, ``reduced`` those of the sums, and ``coordinates`` those of the whole vectors.
    """

    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    asked: int = 0
    selected: int = 0
    reduced: int = 0
    coordinates: int = 0

    @contextmanager
    def selecting(self) -> Iterator[None]:
        """Add the time of the block to ``select_seconds``."""
        start = perf_counter()
        yield
        self.select_seconds += perf_counter() - start

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Add the time of the block to ``communicate_seconds``."""
        start = perf_counter()
        yield
        self.communicate_seconds += perf_counter() - start


@dataclass(frozen=True)
class Request:
    """The inputs of one step besides the gradient.

    Parameters
    ----------
    layers
        Ranges of the vector with densities of their own. They follow each other and cover the
        whole vector; no layers mean the scheme's density everywhere. The same in every step.
    withheld
        Ranges ``[start, stop)`` in which this rank sends nothing and keeps its memory in this step.
        The gradient must be zero there. For drivers that cannot deliver an update to all
        coordinates.
    apart
        Ranges ``[start, stop)`` that the driver sends densely itself. The step leaves them out
        and their update is zero. The exception is a step that sends the whole gradient as it is: it
        includes them, and `Scheme.sent_whole` is True.
    ranks
        How many ranks the average is over, if the gradient is already a sum of several ranks'
        gradients. None: the size of the communicator.
    format
        How streams travel; the same on all ranks.
    meter
        Counts and times what the step does.
    """

    layers: Sequence[Layer] = ()
    withheld: Sequence[Range] = ()
    apart: Sequence[Range] = ()
    ranks: int | None = None
    format: Format = COO
    meter: Meter = field(default_factory=Meter)

    def divisor(self, comm: Communicator) -> int:
        """Return how many ranks the average is over."""
        return self.ranks or comm.size
