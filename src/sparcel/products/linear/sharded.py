"""A model whose coordinates each have one owner, a rank that sums their gradients and changes them.

Rows do not change between epochs, so the ranks tell the owners once which columns each batch has.
A step then sends values alone: each rank pushes the gradient of its batch to the owners, and pulls
the coordinates at the columns of its next batch. A rank sends and receives about two values for
each column of its batch, however many ranks there are, and holds 1/P of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from sparcel.core import kernels
from sparcel.core.comm import Call, Communicator
from sparcel.core.formats import FewBits
from sparcel.products.linear.batches import TAIL, Batch, column_dtype
from sparcel.products.linear.ranks import collect, exchanged, gathered, scattered
from sparcel.products.linear.replicated import STEP, BatchNumbers, BatchView, Pending, StepResult
from sparcel.products.linear.trainer import WaitClock
from sparcel.products.linear.weights import BY_COLUMN, Weights, WholeModel
from sparcel.products.rows.rows import Array

T = TypeVar("T")

_TELL, _READ = Call.of("tell owners", {}), Call.of("read", {})

_BINS = 4096
"""Ranges of columns whose use is counted to find owners that have about equally much to do."""


def _owners(own: Sequence[Array], dimensions: int, comm: Communicator) -> list[int]:
    """Return where each owner's columns begin, and the end: about equally many uses for each."""
    edges = np.linspace(0, dimensions, min(_BINS, dimensions) + 1).astype(np.int64)
    uses = np.zeros(len(edges) - 1, np.int64)
    for columns in own:
        uses += np.diff(np.searchsorted(columns, edges))
    total = np.cumsum(np.sum(gathered(comm, (uses + 1).tolist(), "uses of columns"), axis=0))
    shares = total[-1] * np.arange(1, comm.size) / comm.size
    return [0, *edges[1 + np.searchsorted(total, shares)].tolist(), dimensions]


def _tell_owners(
    own: Sequence[Array], cuts: Sequence[Sequence[int]], dimensions: int, comm: Communicator
) -> list[tuple[Array, Array]]:
    """Tell each owner which of its columns each batch has; all ranks call.

    Parameters
    ----------
    own
        The columns of each of this rank's batches.
    cuts
        Where those of each owner begin in each batch, and the end.

    Returns
    -------
    list
        By rank, which of this owner's columns its batches have, one batch after the other,
        increasing in each, and where each batch's end.
    """
    pieces = [
        [columns[cut[owner] : cut[owner + 1]] for columns, cut in zip(own, cuts, strict=True)]
        for owner in range(comm.size)
    ]
    counts = np.array([[len(piece) for piece in part] for part in pieces], np.int64)
    batches = gathered(comm, len(own), "number of batches")
    none = np.zeros(0, column_dtype(dimensions))

    def tell() -> list[tuple[Array, Array]]:
        told = exchanged(counts.reshape(-1), [len(own)] * comm.size, batches, comm)
        counts_of = np.split(told, np.cumsum(batches)[:-1])
        columns = np.concatenate([none, *chain.from_iterable(pieces)])
        leaving, arriving = ([int(one.sum()) for one in each] for each in (counts, counts_of))
        arrived = np.split(exchanged(columns, leaving, arriving, comm), np.cumsum(arriving)[:-1])
        return list(zip(arrived, map(np.cumsum, counts_of), strict=True))

    return comm.call(_TELL, tell)


class ExactEncoding:
    """Values as they are."""

    def pack(self, values: Array, tail: Array, step: int, place: int) -> Array:
        """Return the values ``[count, width]`` and the tail ``[TAIL, width]`` as one array."""
        return np.concatenate([values, tail])

    def length(self, count: int) -> int:
        """Return the length of what `pack` returns for so many columns."""
        return count + TAIL

    def unpack(self, parts: Array, counts: Sequence[int]) -> Array:
        """Return what was packed, one part after the other, the values and tail of each.

        ``counts`` are the parts' numbers of columns.
        """
        return parts


class RoundedEncoding:
    """Values in few bits, without bias, and the tail as it is.

    Both ends know how many values travel, so a message has no header.

    Parameters
    ----------
    width
        Number of values a column.
    dtype
        Theirs.
    rounding
        How they are rounded.
    """

    def __init__(self, width: int, dtype: np.dtype[Any], rounding: FewBits) -> None:
        self._width, self._dtype, self._rounding = width, dtype, rounding
        self._tail_bytes = TAIL * width * dtype.itemsize

    def pack(self, values: Array, tail: Array, step: int, place: int) -> Array:
        """Return the bytes of the tail, of the scales and of the values ``[count, width]``.

        ``place`` is that of the first column among those of all ranks: it decides which of the
        step's random numbers round the values.
        """
        by = self._rounding
        written = kernels.quantize(
            torch.from_numpy(values.reshape(-1)),
            by.bits,
            by.block,
            seed=by.seed + (step << 32),
            offset=place * self._width,
            scale=torch.float32,
        )
        parts = (tail.reshape(-1), written.scales.numpy(), written.codes.numpy())
        return np.concatenate([part.view(np.uint8) for part in parts])

    def length(self, count: int) -> int:
        """Return how many bytes `pack` returns for so many columns."""
        return sum(self._lengths(count * self._width))

    def unpack(self, parts: Array, counts: Sequence[int]) -> Array:
        """Return what was packed, as `ExactEncoding.unpack` does."""
        found, end = list[Array](), 0
        for count in counts:
            start, end = end, end + self.length(count)
            found += self._one(parts[start:end], count * self._width)
        return np.concatenate(found).reshape(-1, self._width)

    def _one(self, part: Array, size: int) -> tuple[Array, Array]:
        """Return the ``size`` values and the tail of one part."""
        split = torch.from_numpy(part).split(self._lengths(size))
        tail, *coded = (one.clone() for one in split)  # they begin anywhere; copies are aligned
        values = self._rounding.decode(coded, size, torch.float32)
        return values.numpy().astype(self._dtype), tail.numpy().view(self._dtype)

    def _lengths(self, size: int) -> list[int]:
        """Return the bytes of the tail, of the scales and of so many values."""
        return [self._tail_bytes, *self._rounding.part_bytes(size, 4)]


class Sharded:
    """A rank's part of a model, and the exchange with the owners of the others.

    All ranks make one. What owners answer is never rounded.

    Parameters
    ----------
    empty
        A model without columns, of the settings of this one.
    dimensions
        Number of columns of the data.
    batches
        This rank's.
    rounding
        What rounds the gradients that ranks send; None for nothing.

    Attributes
    ----------
    weights
        This rank's part, by those of its columns that occur.
    clock
        Counts how long this rank has waited for exchanges.
    """

    def __init__(
        self,
        empty: Weights,
        dimensions: int,
        batches: Sequence[Batch],
        comm: Communicator,
        rounding: FewBits | None = None,
    ) -> None:
        self._dimensions, self._comm = dimensions, comm
        self.clock, self._exchanges = WaitClock(), WaitClock()
        own = [batch.columns[:-TAIL].numpy() for batch in batches]
        starts = _owners(own, dimensions, comm)
        # Where the columns of each owner begin in each batch.
        self._cuts = [np.searchsorted(columns, starts).tolist() for columns in own]
        told = _tell_owners(own, self._cuts, dimensions, comm)
        self._cuts.append([0] * (comm.size + 1))  # of a rank without a batch
        # Columns of its own that no batch has are zero and stay zero: the owner does without them.
        self._columns = np.unique(np.concatenate([np.unique(columns) for columns, _ in told]))
        self._requested: list[list[Array]] = []  # by rank and batch, by their places among these
        while told:  # what is numbered is not needed any more
            columns, ends = told.pop(0)
            numbers = np.searchsorted(self._columns, columns).astype(np.int32)
            self._requested.append(np.split(numbers, ends))  # the last one is empty
        self.weights = empty.sized(len(self._columns))
        width, dtype = empty.width, empty.dtype
        self._encoding = RoundedEncoding(width, dtype, rounding) if rounding else ExactEncoding()
        # Where gradients are added up; zero between steps.
        self._total = np.zeros((len(self._columns), width), dtype)
        # A push has the batches of one of the last pulls.
        self._whose_columns = lru_cache(maxsize=3)(self._find_whose_columns)

    def read(self, numbers: BatchNumbers) -> BatchView | None:
        """Pull the model as this rank's batch sees it; all ranks call."""
        return self._counted(_READ, lambda: self._pull(numbers))

    def start(
        self, numbers: BatchNumbers, gradient: Array, rate: float, wanted: BatchNumbers, later: bool
    ) -> Pending:
        """See `Replicated.start`; with ``later``, all of a step is done meanwhile."""

        def run() -> StepResult:
            tail = self._push(numbers, gradient, rate)
            return StepResult(tail, self._pull(wanted))

        if not later:
            return lambda: self._counted(STEP, run)
        job = self._comm.submit(lambda: self._comm.call(STEP, run))
        return lambda: self.clock.timed(job.wait)

    def whole(self, everywhere: bool = True) -> WholeModel:
        """Put the whole model together, or, on other ranks than 0, so much of it; all ranks call.

        ``everywhere`` tells whether all ranks get the whole, or rank 0 alone.
        """
        own = self.weights
        lengths = gathered(self._comm, len(self._columns), "number of columns")
        if self._comm.rank == 0 or everywhere:
            own = own.sized(sum(lengths))
        columns = np.empty(own.dimensions, self._columns.dtype)
        collect(self._columns, columns, lengths, everywhere, self._comm)
        for name, array in self.weights.by_column().items():
            collect(array, own.by_column()[name], lengths, everywhere, self._comm)
        state = self.weights.state()
        own.restore({name: a for name, a in state.items() if name not in BY_COLUMN})
        return WholeModel(own, columns, self._dimensions)

    def state(self) -> dict[str, Array]:
        """Return what a later training needs to go on from here; all ranks call."""
        return self.whole(everywhere=False).weights.state()

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take this rank's part of what rank 0 gives of `BY_COLUMN`; all ranks call."""
        comm = self._comm
        counts = gathered(comm, len(self._columns), "number of columns")
        for name, own in self.weights.by_column().items():
            own[...] = scattered(arrays[name] if comm.rank == 0 else own[:0], counts, comm)

    def _counted(self, call: Call, run: Callable[[], T]) -> T:
        """Run a job at once, and count the time of its exchanges."""
        before = self._exchanges.seconds
        result = self._comm.call(call, run)
        self.clock.seconds += self._exchanges.seconds - before
        return result

    def _push(self, numbers: BatchNumbers, gradient: Array, rate: float) -> Array:
        """Send each owner its part of the gradient, with the tail; step with what comes, by ranks.

        Returns the sum of the tails.
        """
        cuts, columns, bounds = self._whose_columns(tuple(numbers))
        tail = gradient[cuts[-1] :][:TAIL]
        if numbers[self._comm.rank] is None:
            tail = np.zeros_like(tail)
        encoding, place = self._encoding, self._comm.rank * self._dimensions
        parts = [
            encoding.pack(gradient[first:last], tail, self.weights.steps, place + first)
            for first, last in pairwise(cuts)
        ]
        counts = [last - first for first, last in pairwise(bounds)]
        arrived = self._exchange(
            np.concatenate(parts), list(map(len, parts)), list(map(encoding.length, counts))
        )
        values = encoding.unpack(arrived, counts)
        total = np.zeros((TAIL, self.weights.width))
        for rank, end in enumerate(bounds[1:]):
            total += values[end + rank * TAIL :][:TAIL]
        self.weights.step_sum(columns, bounds, values, self._total, total, rate)
        return total

    def _pull(self, numbers: BatchNumbers) -> BatchView | None:
        """Send each rank the coordinates that it asks for; return those at this rank's columns."""
        cuts, columns, bounds = self._whose_columns(tuple(numbers))
        coordinates = self._exchange(
            self.weights.read_at(columns),
            [last - first for first, last in pairwise(bounds)],
            [last - first for first, last in pairwise(cuts)],
        )
        if numbers[self._comm.rank] is None:
            return None
        return BatchView(coordinates, self.weights.intercept.copy())

    def _find_whose_columns(self, numbers: BatchNumbers) -> tuple[list[int], Array, list[int]]:
        """Return who has what of these batches.

        That is where each owner's columns begin in this rank's batch, and the end; the columns of
        this owner that the ranks' batches have; and where each rank's begin among these, and the
        end.
        """
        places = [-1 if number is None else number for number in numbers]
        parts = [own[place] for own, place in zip(self._requested, places, strict=True)]
        bounds = [0, *accumulate(map(len, parts))]
        return self._cuts[places[self._comm.rank]], np.concatenate(parts), bounds

    def _exchange(self, rows: Array, leaving: Sequence[int], arriving: Sequence[int]) -> Array:
        """Do what `exchanged` does, and count its time."""
        return self._exchanges.timed(lambda: exchanged(rows, leaving, arriving, self._comm))
