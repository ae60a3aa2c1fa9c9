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
from sparcel.kernels import index_dtype
from sparcel.linear.scd.sums import summed
from sparcel.rows.rows import Array
from sparcel.stream import SparseStream
from sparcel.wire import Wire

T = TypeVar("T")

Step: TypeAlias = Callable[[Array, Array], Array]
"""From coordinates and the sums of their derivatives and curvatures to their new values."""


class Updates:
    """Sums derivatives on every rank, which then makes the new values of all chosen coordinates.

    Parameters
    ----------
    comm
        The ranks; None for one alone.
    size
        Number of coordinates of the model; rank r owns ``[r·n // P, (r+1)·n // P)``.

    Attributes
    ----------
    slices
        Rank r owns the coordinates from ``slices[r]`` on.
    seconds
        How long this rank has waited for the others.
    """

    def __init__(self, comm: Communicator | None, size: int) -> None:
        self._comm, self.seconds = comm, 0.0
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
            ``[chosen, width, 2]`` this rank's derivatives and curvatures.
        values
            ``[size, width]`` the model, which is not changed.
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
        """Return the sum of the ranks' numbers; all ranks call."""
        comm, own = self._comm, np.array([number])
        if comm is None:
            return number
        return float(self._timed(lambda: comm.run(lambda: summed(own, comm))).item())

    def _timed(self, wait: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = wait()
        self.seconds += time.perf_counter() - start
        return result

    def _made(
        self, chosen: Array, sums: Array, values: Array, step: Step, comm: Communicator
    ) -> Array:
        return step(chosen, summed(sums, comm))


@dataclass(frozen=True)
class Share:
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
        """Return this rank's own of the chosen coordinates."""
        return self.chosen[self.bounds[self.rank] : self.bounds[self.rank + 1]]


class Gathered(Updates):
    """Sums derivatives, lets owners change their coordinates, and gathers what they made.

    A rank sends the others those of its coordinates that changed, with their indices.

    Source: SparCML, section 8.2.
    """

    def _made(
        self, chosen: Array, sums: Array, values: Array, step: Step, comm: Communicator
    ) -> Array:
        bounds, total = np.searchsorted(chosen, self.slices), summed(sums, comm)
        first, last = bounds[comm.rank], bounds[comm.rank + 1]
        new = step(chosen[first:last], total[first:last])
        share = Share(values, chosen, bounds, self.slices, new, comm.rank)
        return self._gather(share, Wire(comm))

    def _gather(self, share: Share, wire: Wire) -> Array:
        own, most = share.own(), int(np.diff(share.bounds).max())
        changed = (share.new != share.values[own]).any(axis=1)
        size, width = share.values.shape
        stream = SparseStream.unchecked(
            torch.from_numpy(own[changed]).to(index_dtype(size)),
            torch.from_numpy(share.new[changed]).view((-1, width) if width > 1 else -1),
            size,
        )
        found = share.values[share.chosen]
        for part in collectives.all_gather(stream, wire, max_nnz=most):
            assert part.indices is not None
            places = np.searchsorted(share.chosen, part.indices.numpy())
            found[places] = part.values.numpy().reshape(-1, width)
        return found


GATHERS: dict[str, type[Updates]] = {"nothing": Updates, "sparse": Gathered}
"""What ranks send one another of the new values, by name; all give the same bits."""
