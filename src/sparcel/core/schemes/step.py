"""One step: what it is given, what it does, what it sends, and what it costs a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from operator import add, attrgetter
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from sparcel.core import device, kernels
from sparcel.core.comm import Call, Communicator, digest
from sparcel.core.device import Number, finite_flag
from sparcel.core.formats import RAW, Format
from sparcel.core.kernels import Leg
from sparcel.core.memory import Memory, Range
from sparcel.core.profiling import profiled
from sparcel.core.stream import SparseStream


@dataclass
class Costs:
    """What some steps have cost on this rank, small tensors and sparse gradients included.

    A scheme adds times while its step runs, and whoever ends the step the rest. Statistics are sums
    of steps.

    Attributes
    ----------
    steps
        How many steps these are. Those that a gradient with NaN or Inf made void count too.
    messages_sent, bytes_sent, bytes_received
        What the communicator of the exchange counted during these steps.
    dense_bytes
        Bytes that this rank would have sent for the same gradients by a ring all-reduce:
        2(P−1)/P times the bytes of the gradients in their own dtype.
    coordinates, asked, selected, reduced
        Coordinates of the gradients; those among them that the densities ask for, that this rank
        sent, and that the updates had. Small tensors count as sent whole. Of a sparse gradient,
        as embeddings make it, the rows that were used count as sent.
    magnitude
        The sum of ``|x|`` over what left this rank's memory, less that over what came back to it or
        arrived from other ranks.
    flushed
        What is in ``magnitude`` because the scheme was switched to one without memory: see
        `Handle.switch`.
    select_seconds, communicate_seconds
        Time spent selecting and exchanging; it may overlap with computation. An exchange includes
        waiting for slower ranks, and the second selection of `oktopk`.
    """

    steps: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    coordinates: int = 0
    asked: int = 0
    selected: int = 0
    reduced: int = 0
    magnitude: float = 0.0
    flushed: float = 0.0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0

    @property
    def compression(self) -> float:
        """How many times fewer bytes were sent than a dense exchange would have sent.

        NaN if nothing was sent.
        """
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else float("nan")

    @property
    def density_before(self) -> float:
        """The share of all coordinates that this rank sent."""
        return self.selected / max(1, self.coordinates)

    @property
    def density_after(self) -> float:
        """The share of all coordinates that the updates had."""
        return self.reduced / max(1, self.coordinates)

    def __add__(self, other: Costs) -> Costs:
        return Costs(*map(add, _all(self), _all(other)))

    def settle(
        self, outcomes: Sequence[Outcome], flags: Sequence[bool | Tensor] = ()
    ) -> tuple[list[Outcome], bool]:
        """Add what steps have done, and tell whether all are finite, and all flags true.

        This is where the host looks at a GPU, once.

        Returns
        -------
        list, bool
            The outcomes, with flags of the host; whether all is finite.
        """
        counts = [
            value
            for one in outcomes
            for value in (one.finite, one.sent, one.entries, *one.magnitudes)
        ]
        found = iter(device.numbers([*counts, *flags]))
        on_host, magnitude = [], 0.0
        for one in outcomes:
            finite, sent, entries = next(found), next(found), next(found)
            magnitude += sum(next(found) for _ in one.magnitudes)
            on_host.append(one._replace(finite=finite))
            self.coordinates += one.coordinates
            self.asked += one.asked
            self.selected += sent
            self.reduced += min(entries, one.coordinates)
        takes_effect = all(one.finite for one in on_host) and all(found)
        if takes_effect:
            self.magnitude += magnitude
        return on_host, takes_effect

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
        return self._timed("select_seconds", "select")

    def communicating(self) -> AbstractContextManager[None]:
        """Add the time of the block to ``communicate_seconds``; profiles show it as a range."""
        return self._timed("communicate_seconds", "exchange")

    @contextmanager
    def _timed(self, seconds: str, name: str) -> Iterator[None]:
        start = perf_counter()
        with profiled(name):
            yield
        setattr(self, seconds, getattr(self, seconds) + perf_counter() - start)


_all = attrgetter(*(field.name for field in fields(Costs)))


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


class Selection:
    """What this rank takes out of memory + gradient in a step, to send it.

    Attributes
    ----------
    sent
        What was taken out, sparse.
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

    def put_back(self, stream: SparseStream, start: int = 0) -> None:
        """Put values from ``start`` on back into memory: they were sent in vain, or lost."""
        self._memory.keep(stream, start)
        self.magnitude -= magnitude_of(stream)


def magnitude_of(stream: SparseStream) -> float | Tensor:
    """Return the sum of the magnitudes of a stream's values, on a GPU as a tensor."""
    magnitude = stream.values.abs().sum()  # four times as fast as torch's 1-norm
    return float(magnitude) if magnitude.is_cpu else magnitude


class Outcome(NamedTuple):
    """A step that has not taken effect; `Scheme.commit` makes it.

    On a GPU, flags and counts may be tensors there until `Costs.settle` has read them.

    Attributes
    ----------
    average
        The average over the ranks, in the gradient's dtype, the same on all ranks. A dense one is
        in the ``out`` that `Scheme.reduce` got; `sparcel.core.stream.WRITTEN` once any is.
    finite
        Whether the vectors of all ranks, and their average, are finite. If not, the average is
        meaningless, and the step is void, on all ranks alike.
    sent, entries, magnitudes, coordinates, asked
        What the step adds to ``selected``, ``reduced``, ``magnitude``, ``coordinates`` and
        ``asked`` of `Costs`; the sum of the magnitudes.
    sent_whole
        Whether the gradient was sent as it is, with what `Request.apart` names.
    """

    average: SparseStream
    finite: bool | Tensor
    sent: Number
    entries: Number
    magnitudes: tuple[Number, ...]
    coordinates: int
    asked: int
    sent_whole: bool = False


def averaged(
    total: SparseStream, divisor: float, dtype: torch.dtype, out: Tensor | None = None
) -> SparseStream:
    """Return the average in ``dtype``; a dense one is in ``out``, if given.

    All ranks find the same, because the total is the same on all of them.
    """
    with profiled("update"):
        if total.indices is None and out is not None:
            values = kernels.average(total.values, divisor, out)
        elif divisor == 1:
            values = total.values.to(dtype)
        else:
            values = kernels.average(total.values, divisor).to(dtype)
        finite = total.finite & finite_flag(values)
        return SparseStream.unchecked(total.indices, values, total.size, finite)
