"""A model whose coordinates each have one owner, a rank that sums their gradients and changes them.

Rows do not change between epochs, so the ranks tell the owners once which columns each batch has.
A step then sends values alone: each rank pushes the gradient of its batch to the owners, and pulls
the coordinates at the columns of its next batch. A rank sends and receives about two values for
each column of its batch, however many ranks there are, and holds 1/P of the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from sparcel.comm import Call, Communicator
from sparcel.linear.batches import TAIL, Batch, column_dtype
from sparcel.linear.ranks import gathered
from sparcel.linear.replicated import Numbers, Pending, Point, Stepped
from sparcel.linear.weights import BY_COLUMN, Weights
from sparcel.linear.whole import Whole
from sparcel.rows.rows import Array
from sparcel.stream import SparseStream, reduce

T = TypeVar("T")

_READ, _STEP, _EXCHANGE = (Call.of(f"Sharded.{name}", {}) for name in ("read", "step", "exchange"))
"""What ranks call, which their messages tell: ranks that get out of step learn it."""

_BINS = 4096
"""Ranges of columns whose use is counted to find owners that have about equally much to do."""


@dataclass(frozen=True)
class Asked:
    """Which of this owner's columns the batches of one rank have.

    Attributes
    ----------
    columns
        Batch after batch, increasing in each.
    bounds
        ``[batches + 1]``: where each batch's begin in ``columns``.
    """

    columns: Array
    bounds: Array

    def numbered(self, columns: Array) -> Asked:
        """Return the same with the places of these among ``columns``, which are sorted."""
        return Asked(np.searchsorted(columns, self.columns).astype(np.int32), self.bounds)

    def of(self, number: int | None) -> torch.Tensor:
        """Return the columns of a batch; none if there is no batch."""
        if number is None:
            return torch.from_numpy(self.columns[:0])
        return torch.from_numpy(self.columns[self.bounds[number] : self.bounds[number + 1]])


class Sharded:
    """A rank's part of a model, and the exchange with the owners of the others.

    All ranks make one, with what their `Replicated` would get.
    """

    def __init__(
        self, settings: Mapping[str, Any], batches: Sequence[Batch], comm: Communicator
    ) -> None:
        self._settings, self._comm = dict(settings), comm
        self.seconds = self._exchanging = 0.0
        own = [batch.columns[:-TAIL].numpy() for batch in batches]
        starts = _owners(own, settings["dimensions"], comm)
        # Where the columns of each owner begin in each batch.
        self._cuts = [np.searchsorted(columns, starts) for columns in own]
        asked = self._tell_owners(own)
        # Columns of its own that no batch has are zero and stay zero: the owner does without them.
        self._columns = np.unique(np.concatenate([np.unique(one.columns) for one in asked]))
        self._asked: list[Asked] = []
        while asked:  # frees what is numbered
            self._asked.append(asked.pop(0).numbered(self._columns))
        self.weights = Weights(**{**self._settings, "dimensions": len(self._columns)})

    def read(self, numbers: Numbers) -> Point | None:
        """Pull the model as this rank's batch sees it; all ranks call."""
        return self._counted(_READ, lambda: self._pull(numbers))

    def step(self, numbers: Numbers, gradient: Array, rate: float, wanted: Numbers) -> Stepped:
        """Take a step with the gradients of these batches, and read those wanted next."""
        return self._counted(_STEP, lambda: self._step(numbers, gradient, rate, wanted))

    def start(self, numbers: Numbers, gradient: Array, rate: float, wanted: Numbers) -> Pending:
        """Begin what `step` does, on the communicator's thread."""
        comm = self._comm
        job = comm.submit(
            lambda: comm.call(_STEP, lambda: self._step(numbers, gradient, rate, wanted))
        )

        def wait() -> Stepped:
            start = time.perf_counter()
            stepped = job.wait()
            self.seconds += time.perf_counter() - start
            return stepped

        return wait

    def whole(self, everywhere: bool = True) -> Whole:
        """Put the whole model together, or, on other ranks than 0, so much of it; all ranks call.

        ``everywhere`` tells whether all ranks get the whole, or rank 0 alone.
        """
        own, dimensions = self.weights, self._settings["dimensions"]
        lengths = gathered(self._comm, len(self._columns))
        if self._comm.rank == 0 or everywhere:
            own = Weights(**{**self._settings, "dimensions": sum(lengths)})
        columns = np.empty(own.dimensions, self._columns.dtype)
        self._gather(self._columns, columns, lengths, everywhere)
        for name, array in self.weights.by_column().items():
            self._gather(array, own.by_column()[name], lengths, everywhere)
        state = self.weights.state()
        own.restore({name: a for name, a in state.items() if name not in BY_COLUMN})
        return Whole(own, columns, dimensions)

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take this rank's part of what rank 0 gives of `BY_COLUMN`; all ranks call."""
        comm = self._comm
        ends = np.cumsum([0, *gathered(comm, len(self._columns))])
        for name, own in self.weights.by_column().items():
            values = torch.from_numpy(arrays[name] if comm.rank == 0 else own[:0])
            parts = [values[first:last] for first, last in pairwise(ends)]
            lengths = [own.size if rank == 0 else 0 for rank in range(comm.size)]
            own[...] = self._run_exchange(parts, lengths)[0].view(own.shape).numpy()

    def _counted(self, call: Call, run: Callable[[], T]) -> T:
        """Run a job at once, and count the time of its exchanges."""
        before = self._exchanging
        result = self._comm.call(call, run)
        self.seconds += self._exchanging - before
        return result

    def _step(self, numbers: Numbers, gradient: Array, rate: float, wanted: Numbers) -> Stepped:
        total, tail = self._push(numbers, gradient)
        values = total.values.numpy().reshape(-1, self.weights.width)
        self.weights.step(
            None if total.indices is None else total.indices.numpy(), values, tail, rate
        )
        return Stepped(tail, self._pull(wanted))

    def _push(self, numbers: Numbers, gradient: Array) -> tuple[SparseStream, Array]:
        """Send each owner its part of the gradient, with the tail; sum what comes by ranks."""
        rank, width = self._comm.rank, self.weights.width
        number = numbers[rank]
        cuts = [0] * (self._comm.size + 1) if number is None else self._cuts[number].tolist()
        own = gradient[: cuts[-1] + TAIL] if number is not None else np.zeros_like(gradient[:TAIL])
        parts = [_joined(own[first:last], own[-TAIL:]) for first, last in pairwise(cuts)]
        counts = [len(asked.of(n)) for asked, n in zip(self._asked, numbers, strict=True)]
        arrived = self._exchange(parts, [(count + TAIL) * width for count in counts])
        streams, tail = [], np.zeros((TAIL, width))
        for values, asked, n in zip(arrived, self._asked, numbers, strict=True):
            rows = values.view(-1, width)
            tail += rows[-TAIL:].numpy()
            shaped = rows[:-TAIL] if width > 1 else rows[:-TAIL, 0]
            streams.append(SparseStream.unchecked(asked.of(n), shaped, self.weights.dimensions))
        return reduce(streams), tail

    def _pull(self, numbers: Numbers) -> Point | None:
        """Send each rank the coordinates that it asks for; return those at this rank's columns."""
        rank, width = self._comm.rank, self.weights.width
        columns = [asked.of(n) for asked, n in zip(self._asked, numbers, strict=True)]
        found = torch.from_numpy(self.weights.read_at(torch.cat(columns)))
        number = numbers[rank]
        counts = [0] * self._comm.size if number is None else np.diff(self._cuts[number]).tolist()
        arrived = self._exchange(
            list(found.split([len(part) for part in columns])), [c * width for c in counts]
        )
        if number is None:
            return None
        return Point(torch.cat(arrived).view(-1, width).numpy(), self.weights.intercept.copy())

    def _exchange(
        self, parts: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        """Send each rank its part; return what each rank sent, ``lengths`` values."""
        start, comm, dtype = time.perf_counter(), self._comm, parts[0].dtype
        others = [r for r in range(comm.size) if r != comm.rank]
        arrived = comm.exchange(
            {r: parts[r].reshape(-1).view(torch.uint8) for r in others if parts[r].numel()},
            {r: lengths[r] * dtype.itemsize for r in others if lengths[r]},
        )
        self._exchanging += time.perf_counter() - start
        found = {rank: message.view(dtype) for rank, message in arrived.items()}
        found[comm.rank] = parts[comm.rank].reshape(-1)
        none = torch.empty(0, dtype=dtype)
        return [found.get(rank, none) for rank in range(comm.size)]

    def _tell_owners(self, own: Sequence[Array]) -> list[Asked]:
        """Tell each owner which of its columns each batch has; return what the ranks ask for."""
        comm, ranks = self._comm, range(self._comm.size)
        dtype = column_dtype(self._settings["dimensions"])
        parts, counts = [], []
        for owner in ranks:
            pieces = [
                columns[cuts[owner] : cuts[owner + 1]]
                for columns, cuts in zip(own, self._cuts, strict=True)
            ]
            counts.append([len(piece) for piece in pieces])
            parts.append(torch.from_numpy(np.concatenate([np.zeros(0, dtype), *pieces])))
        batches = gathered(comm, len(own))
        numbers_of = [torch.tensor(numbers, dtype=torch.int64) for numbers in counts]
        told = [one.tolist() for one in self._run_exchange(numbers_of, batches)]
        arrived = self._run_exchange(parts, [sum(numbers) for numbers in told])
        return [
            Asked(columns.numpy(), np.cumsum([0, *numbers]))
            for columns, numbers in zip(arrived, told, strict=True)
        ]

    def _gather(self, own: Array, out: Array, counts: Sequence[int], everywhere: bool) -> None:
        """Write what all owners have, one after the other, to ``out`` on the ranks that get it.

        One owner sends at a time, so that a rank has only one part twice.
        """
        ranks, wide = range(self._comm.size), math.prod(own.shape[1:])
        takers = ranks if everywhere else range(1)
        none, part, first = torch.from_numpy(own[:0]), torch.from_numpy(own), 0
        for owner, count in enumerate(counts):
            is_owner, is_taker = owner == self._comm.rank, self._comm.rank in takers
            parts = [part if is_owner and rank in takers else none for rank in ranks]
            lengths = [count * wide if is_taker and rank == owner else 0 for rank in ranks]
            arrived = self._run_exchange(parts, lengths)[owner]
            if is_taker:
                out[first : first + count] = arrived.view(count, *own.shape[1:]).numpy()
            first += count

    def _run_exchange(
        self, parts: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        return self._comm.call(_EXCHANGE, lambda: self._exchange(parts, lengths))


def _owners(own: Sequence[Array], dimensions: int, comm: Communicator) -> list[int]:
    """Return where each owner's columns begin, and the end: about equally many uses for each."""
    edges = np.linspace(0, dimensions, min(_BINS, dimensions) + 1).astype(np.int64)
    uses = np.zeros(len(edges) - 1, np.int64)
    for columns in own:
        uses += np.diff(np.searchsorted(columns, edges))
    total = np.cumsum(np.sum(gathered(comm, (uses + 1).tolist()), axis=0))
    shares = total[-1] * np.arange(1, comm.size) / comm.size
    return [0, *edges[1 + np.searchsorted(total, shares)].tolist(), dimensions]


def _joined(values: Array, tail: Array) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([values, tail]))
