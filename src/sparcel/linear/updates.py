"""From the ranks' partial derivatives to new values of coordinates, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from sparcel import collectives, patterns
from sparcel.comm import Communicator
from sparcel.errors import known
from sparcel.kernels import index_dtype
from sparcel.rows.rows import Array
from sparcel.stream import SparseStream
from sparcel.wire import Wire

T = TypeVar("T")

Step: TypeAlias = Callable[[Array, Array], Array]
"""From coordinates and the sums of their derivatives and curvatures to their new values."""


@dataclass(frozen=True)
class _Share:
    """Who owns which of the chosen coordinates, and this rank's new values of its own.

    Attributes
    ----------
    values
        The model before this step.
    chosen
        The coordinates of all ranks, increasing; rank r owns those from ``bounds[r]`` on.
    slices
        Rank r owns the coordinates from ``slices[r]`` on.
    new
        The values of this rank's own of the chosen coordinates.
    """

    values: Array
    chosen: Array
    bounds: Array
    slices: Array
    new: Array
    rank: int

    def own(self) -> Array:
        return self.chosen[self.bounds[self.rank] : self.bounds[self.rank + 1]]


class Updates:
    """Sums derivatives, lets each coordinate's owner change it, and gathers what the owners made.

    Parameters
    ----------
    comm
        The ranks; None for one alone.
    gather
        What a rank sends the others of its own coordinates: ``"sparse"``, the chosen ones that
        changed, with their indices; ``"values"``, all chosen ones without indices, which follow
        from the seed; ``"dense"``, its whole slice of the model. All give the same bits.
    size
        Number of coordinates of the model; rank r owns ``[r·n // P, (r+1)·n // P)``.

    Attributes
    ----------
    seconds
        How long this rank has waited for the others.
    """

    def __init__(self, comm: Communicator | None, gather: str, size: int) -> None:
        self._comm, self.seconds = comm, 0.0
        self._gather = _GATHERS[known(gather, _GATHERS, "gather")]
        self.slices = np.array(patterns.regions(size, comm.size if comm else 1))

    @property
    def volume(self) -> int:
        """The larger of the bytes sent and received so far."""
        return self._comm.traffic.volume if self._comm else 0

    def make(self, chosen: Array, sums: Array, values: Array, step: Step) -> Array:
        """Return the new values of the coordinates ``chosen``; all ranks call.

        Parameters
        ----------
        sums
            ``[chosen, 2]`` this rank's derivatives and curvatures.
        values
            The model, which is not changed.
        """
        comm = self._comm
        if comm is None:
            return step(chosen, sums)
        return self._timed(lambda: comm.run(lambda: self._made(chosen, sums, values, step, comm)))

    def start(self, chosen: Array, sums: Array, values: Array, step: Step) -> Callable[[], Array]:
        """Begin what `make` does, and return a function that waits for it."""
        comm = self._comm
        if comm is None:
            made = step(chosen, sums)
            return lambda: made
        job = comm.submit(lambda: self._made(chosen, sums, values, step, comm))
        return lambda: self._timed(job.wait)

    def total(self, number: float) -> float:
        """Return the sum of the ranks' numbers, in the order of the ranks."""
        comm = self._comm
        if comm is None:
            return number
        own = _dense(np.array([number]))
        parts = self._timed(lambda: comm.run(lambda: collectives.all_gather(own, Wire(comm))))
        return float(sum(part.values.item() for part in parts))

    def _timed(self, wait: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = wait()
        self.seconds += time.perf_counter() - start
        return result

    def _made(
        self, chosen: Array, sums: Array, values: Array, step: Step, comm: Communicator
    ) -> Array:
        wire, bounds = Wire(comm), np.searchsorted(chosen, self.slices)
        # Owners have equal regions, so that the sum of each goes to the rank that needs it.
        most = int(np.diff(bounds).max())
        padded = np.zeros((comm.size * most, 2))
        padded[_places(np.arange(len(chosen)), bounds, bounds, most)] = sums
        total = collectives.reduce_scatter(_dense(padded), wire).values.numpy()
        first, last = bounds[comm.rank], bounds[comm.rank + 1]
        new = step(chosen[first:last], total[: last - first])
        return self._gather(_Share(values, chosen, bounds, self.slices, new, comm.rank), wire)


def _gather_sparse(share: _Share, wire: Wire) -> Array:
    own, most = share.own(), int(np.diff(share.bounds).max())
    changed = share.new != share.values[own]
    size = len(share.values)
    stream = SparseStream.unchecked(
        torch.from_numpy(own[changed]).to(index_dtype(size)),
        torch.from_numpy(share.new[changed]),
        size,
    )
    found = share.values[share.chosen]
    for part in collectives.all_gather(stream, wire, max_nnz=most):
        assert part.indices is not None
        found[np.searchsorted(share.chosen, part.indices.numpy())] = part.values.numpy()
    return found


def _gather_values(share: _Share, wire: Wire) -> Array:
    most = int(np.diff(share.bounds).max())
    padded = np.zeros(most, share.new.dtype)
    padded[: len(share.new)] = share.new
    parts = collectives.all_gather(_dense(padded), wire)
    return _joined(parts)[_places(np.arange(len(share.chosen)), share.bounds, share.bounds, most)]


def _gather_dense(share: _Share, wire: Wire) -> Array:
    first, last = share.slices[share.rank], share.slices[share.rank + 1]
    most = int(np.diff(share.slices).max())
    padded = np.zeros(most, share.new.dtype)
    padded[: last - first] = share.values[first:last]
    padded[share.own() - first] = share.new
    parts = collectives.all_gather(_dense(padded), wire)
    return _joined(parts)[_places(share.chosen, share.slices, share.bounds, most)]


_GATHERS: dict[str, Callable[[_Share, Wire], Array]] = {
    "sparse": _gather_sparse,
    "values": _gather_values,
    "dense": _gather_dense,
}


def _places(positions: Array, starts: Array, bounds: Array, length: int) -> Array:
    """Return where positions are once each rank's part is ``length`` long.

    Positions from ``bounds[r]`` on are rank r's; its part begins at position ``starts[r]``.
    """
    shifts = np.arange(len(starts) - 1) * length - starts[:-1]
    return positions + np.repeat(shifts, np.diff(bounds))


def _dense(values: Array) -> SparseStream:
    return SparseStream.unchecked(None, torch.from_numpy(values), len(values))


def _joined(parts: list[SparseStream]) -> Array:
    return torch.cat([part.values for part in parts]).numpy()
