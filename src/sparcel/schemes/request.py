"""A driver's settings for one step: layers, ranges to leave out, divisor, scale, and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sparcel.comm import Communicator
from sparcel.memory import Range
from sparcel.schemes.costs import Costs

Layer = tuple[int, int, float | None]
"""``(start, stop, density)``: consecutive coordinates with a density of their own. None stands for
the scheme's density."""


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
        includes them, and says so in `Outcome.sent_whole`.
    ranks
        How many ranks the average is over, if the gradient is already a sum of several ranks'
        gradients. None: the size of the communicator.
    scale
        What the gradient was multiplied by, as a GradScaler does; the same on all ranks. Memory
        holds unscaled values, and the update is scaled again. Schemes without memory take the
        gradient as it is.
    front_loaded
        Whether the scheme sends more in its first steps, unless it has a ``warmup`` of its own: see
        `sparcel.schemes.density.front_loaded`.
    tensors
        Which tensors the vector holds, by name; the same on all ranks, which compare them.
    costs
        Takes the times of what the step does. Whoever ends the step adds its counts.
    """

    layers: Sequence[Layer] = ()
    withheld: Sequence[Range] = ()
    apart: Sequence[Range] = ()
    ranks: int | None = None
    scale: float = 1.0
    front_loaded: bool = False
    tensors: tuple[str, ...] = ()
    costs: Costs = field(default_factory=Costs)

    def divisor(self, comm: Communicator) -> int:
        """Return how many ranks the average is over."""
        return self.ranks or comm.size

    def count(self, size: int) -> int:
        """Return how many of a vector's coordinates are not exchanged apart."""
        return size - sum([stop - start for start, stop in self.apart])
