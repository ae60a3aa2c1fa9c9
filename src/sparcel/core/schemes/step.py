"""What a step is given, what it does, and what it takes out of memory and gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from sparcel.core.comm import Call, Communicator, digest
from sparcel.core.formats import RAW, Format
from sparcel.core.kernels import Leg
from sparcel.core.memory import Memory, Range
from sparcel.core.schemes.costs import Costs
from sparcel.core.stream import SparseStream

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
        `sparcel.core.schemes.density.front_loaded`.
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


class Span(NamedTuple):
    """Coordinates ``[start, stop)`` with a density, and how many of them it asks for."""

    start: int
    stop: int
    density: float
    k: int


def named(tensors: tuple[str, ...]) -> dict[str, object]:
    """Return facts that tell tensors from others, by name; nothing for none."""
    if not tensors:
        return {}
    others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return {"tensors": f"{tensors[0]}{others}", "digest": digest("\n".join(tensors), 32)}


@dataclass(frozen=True, eq=False)
class Plan:
    """What a step does: the same on all ranks, and in all steps until something changes.

    Attributes
    ----------
    call
        All of it, and whose gradients it averages, for the ranks to compare.
    ranks
        How many ranks the average is over.
    coordinates, asked
        How many coordinates are not exchanged apart; how many of them the densities ask for.
    spans
        The vector's ranges with their densities; empty for a scheme that sends all.
    format
        How streams travel.
    up, down
        What travels to the owners of regions, and what comes back, if the step goes by regions.
    """

    call: Call
    ranks: int
    coordinates: int
    asked: int
    spans: tuple[Span, ...] = ()
    format: Format = RAW
    up: Leg | None = None
    down: Leg | None = None


class Step(NamedTuple):
    """One step of one vector: what it is given, and what it does.

    ``out`` is a tensor like ``gradient``, or the gradient itself, to which the update is written;
    None if it is wanted as a stream.
    """

    gradient: Tensor
    comm: Communicator
    request: Request
    plan: Plan
    out: Tensor | None


class Ledger:
    """What this rank sends in a step.

    Attributes
    ----------
    sent
        What the rank has taken out of memory + gradient, sparse.
    k
        The number of coordinates that the density asks for.
    most
        An upper bound on the entries that any rank selected. ``k`` and ``most`` are the same on all
        ranks.
    magnitude
        The sum of |x| over what was taken out, less that over what was kept.
    """

    def __init__(self, memory: Memory, sent: SparseStream, k: int, most: int) -> None:
        self._memory, self.sent, self.k, self.most = memory, sent, k, most
        self.magnitude = magnitude_of(sent)

    def take(self, indices: Tensor) -> None:
        """Take these coordinates out of memory + gradient, to send them.

        ``indices`` are ``[nnz]``, sorted and unique.
        """
        values = self._memory.take(indices)
        self.sent = SparseStream.unchecked(indices, values, self.sent.size, self.sent.finite)
        self.magnitude += magnitude_of(self.sent)

    def keep(self, stream: SparseStream, start: int = 0) -> None:
        """Give values from ``start`` on back to the memory: they were sent in vain, or lost."""
        self._memory.keep(stream, start)
        self.magnitude -= magnitude_of(stream)


def magnitude_of(stream: SparseStream) -> float | Tensor:
    """Return the sum of the magnitudes of a stream's values, on a GPU as a tensor."""
    magnitude = stream.values.abs().sum()  # four times as fast as torch's 1-norm
    return float(magnitude) if magnitude.is_cpu else magnitude
