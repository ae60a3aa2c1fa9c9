"""A model whose coordinates each have one owner, a rank that sums their gradients and changes them.

Rows do not change between epochs, so the ranks tell the owners once which columns each batch has.
A step then sends values alone: each rank pushes the gradient of its batch to the owners, and pulls
the coordinates at the columns of its next batch. A rank sends and receives about two values for
each column of its batch, however many ranks there are, and holds 1/P of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from sparcel.comm import Call, Communicator
from sparcel.formats import FewBits
from sparcel.linear.ranks import collect, exchanged, gathered, scattered
from sparcel.linear.sgd.batches import TAIL, Batch
from sparcel.linear.sgd.encodings import ExactEncoding, RoundedEncoding
from sparcel.linear.sgd.owners import RequestedColumns, owners, tell_owners
from sparcel.linear.sgd.replicated import STEP, BatchNumbers, BatchView, Pending, StepResult
from sparcel.linear.sgd.weights import BY_COLUMN, Weights, WholeModel
from sparcel.linear.trainer import Stopwatch
from sparcel.rows.rows import Array

T = TypeVar("T")

_READ = Call.of("read", {})
"""What messages of a read say that they belong to."""


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
        self.clock, self._exchanges = Stopwatch(), Stopwatch()
        own = [batch.columns[:-TAIL].numpy() for batch in batches]
        starts = owners(own, dimensions, comm)
        # Where the columns of each owner begin in each batch.
        self._cuts = [np.searchsorted(columns, starts).tolist() for columns in own]
        requested = tell_owners(own, self._cuts, dimensions, comm)
        self._cuts.append([0] * (comm.size + 1))  # of a rank without a batch
        # Columns of its own that no batch has are zero and stay zero: the owner does without them.
        self._columns = np.unique(np.concatenate([np.unique(one.columns) for one in requested]))
        self._requested: list[RequestedColumns] = []
        while requested:  # what is numbered is not needed any more
            self._requested.append(requested.pop(0).numbered(self._columns))
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
        number = numbers[self._comm.rank]
        parts = [requested.of(n) for requested, n in zip(self._requested, numbers, strict=True)]
        bounds = [0, *accumulate(map(len, parts))]
        return self._cuts[-1 if number is None else number], np.concatenate(parts), bounds

    def _exchange(self, rows: Array, leaving: Sequence[int], arriving: Sequence[int]) -> Array:
        """Do what `exchanged` does, and count its time."""
        return self._exchanges.timed(lambda: exchanged(rows, leaving, arriving, self._comm))
