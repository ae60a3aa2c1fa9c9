"""A model that every rank holds, and changes by the sum of all ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparcel.core import auto, kernels
from sparcel.core.collectives.all_reduce import split_allgather
from sparcel.core.comm import Call, Communicator
from sparcel.core.formats import FewBits, Format
from sparcel.core.kernels import index_dtype
from sparcel.core.ops import SUM
from sparcel.core.stream import SparseStream, concatenate
from sparcel.core.wire import Wire
from sparcel.products.linear.batches import TAIL, Batch
from sparcel.products.linear.ranks import broadcast, collect, gathered, scattered
from sparcel.products.linear.trainer import WaitClock
from sparcel.products.linear.weights import Weights, WholeModel
from sparcel.products.rows.rows import Array


class Owed:
    """What a rank keeps back of its gradients, at each coordinate of the model.

    A step looks at the columns of its batch alone, so it costs what these cost. What is owed
    elsewhere waits for a batch that has those columns. (`memory.Memory` selects among all
    coordinates, and reads them all in each step; and it knows no rows of several classes.)

    Parameters
    ----------
    weights
        The model, whose shape and dtype are those of what is owed.
    most
        How many columns a step sends.
    """

    def __init__(self, weights: Weights, most: int) -> None:
        shape = (weights.dimensions, weights.width)
        dtype = torch.from_numpy(np.empty(0, weights.dtype)).dtype
        self.values = torch.zeros(shape[:1] if weights.width == 1 else shape, dtype=dtype)
        self._most = most

    def take(self, columns: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Take out the columns with most of what is owed and the gradient; keep the rest.

        Parameters
        ----------
        columns
            ``[count]`` increasing.
        gradient
            ``[count]``, or ``[count, width]``: a column then counts by the norm of its row.

        Returns
        -------
        tuple
            The columns, increasing, and the values there.
        """
        total = self.values.index_select(0, columns).add_(gradient)
        sizes = total if total.ndim == 1 else total.norm(dim=1)
        chosen, _ = kernels.topk(sizes, self._most)
        taken = total.index_select(0, chosen)
        total.index_fill_(0, chosen.long(), 0)
        kernels.scatter(self.values, columns, total)
        return columns.index_select(0, chosen), taken

    def give_back(self, lost: SparseStream) -> None:
        """Owe what rounding took as well."""
        if lost.indices is None:
            self.values += lost.values
        else:
            kernels.scatter_reduce(self.values, lost.indices, lost.values, SUM)

    def state(self, comm: Communicator) -> dict[str, Array]:
        """Return what all ranks owe, one after the other, complete on rank 0; all ranks call."""
        values = self.values.numpy()
        columns = np.flatnonzero(values if values.ndim == 1 else values.any(axis=1))
        counts = gathered(comm, len(columns), "number of debts")
        state = {"owed_ends": np.cumsum([0, *counts])}
        for name, own in (("owed_columns", columns), ("owed", values[columns])):
            length = sum(counts) if comm.rank == 0 else 0
            state[name] = np.empty((length, *own.shape[1:]), own.dtype)
            collect(own, state[name], counts, False, comm)
        return state

    def restore(self, state: Mapping[str, Array], comm: Communicator) -> None:
        """Take over what this rank owed, of what rank 0 gives; all ranks call."""
        given = np.diff(state["owed_ends"]).tolist() if comm.rank == 0 else None
        counts = gathered(comm, given, "number of debts")[0]
        values = self.values.numpy()
        nothing = {"owed_columns": np.empty(0, np.int64), "owed": values[:0]}
        columns, owed = (
            scattered(state[name] if comm.rank == 0 else none, counts, comm)
            for name, none in nothing.items()
        )
        values.fill(0)
        values[columns] = owed


STEP = Call.of("step", {})
"""What messages of a step say that they belong to."""


class BatchView(NamedTuple):
    """The model as a batch sees it: the coordinates at its columns, and the intercepts."""

    coordinates: Array
    intercept: Array


class StepResult(NamedTuple):
    """What a step gives back: the tail of the summed gradient, and the model for a later batch."""

    tail: Array
    point: BatchView | None


Pending: TypeAlias = Callable[[], StepResult]
"""Waits for a step and returns what it gives back."""

BatchNumbers: TypeAlias = Sequence[int | None]
"""The number of the batch that each rank takes, by rank; None where it has none left."""


class Exchange(NamedTuple):
    """How ranks sum gradients.

    Attributes
    ----------
    algorithm, format, max_nnz
        Of `sparcel.all_reduce`.
    sent
        How many columns of its gradient and of what it owes a rank sends a step; None for all of
        its batch. It owes the rest, and what rounding takes. The tail is sent as it is.
    rounding
        What rounds the values that are sent, and their sum, without bias; None for nothing.
        Without ``sent`` what it takes is lost.
    """

    algorithm: str
    format: str
    max_nnz: int
    sent: int | None = None
    rounding: FewBits | None = None


class Replicated:
    """A whole model on every rank.

    Parameters
    ----------
    model
        It is equal on all ranks. That of one rank alone has only the columns that occur; all other
        coordinates are zero and stay zero.
    batches
        This rank's.
    comm
        The ranks; None for one alone, whose gradient is the sum.
    exchange
        How gradients are summed, alike on all ranks.

    Attributes
    ----------
    weights
        Those of the model.
    clock
        Counts how long this rank has waited for sums.
    """

    def __init__(
        self,
        model: WholeModel,
        batches: Sequence[Batch],
        comm: Communicator | None,
        exchange: Exchange,
    ) -> None:
        self._model, self.weights = model, model.weights
        self._batches, self._comm, self._exchange = batches, comm, exchange
        self._rank = 0 if comm is None else comm.rank
        self._owed = None if exchange.sent is None else Owed(self.weights, exchange.sent)
        self.clock = WaitClock()

    def read(self, numbers: BatchNumbers) -> BatchView | None:
        """Return the model as this rank's batch sees it."""
        number = numbers[self._rank]
        if number is None:
            return None
        coordinates = self.weights.read_at(self._batches[number].columns[:-TAIL])
        return BatchView(coordinates, self.weights.intercept.copy())

    def start(
        self, numbers: BatchNumbers, gradient: Array, rate: float, wanted: BatchNumbers, later: bool
    ) -> Pending:
        """Begin a step with the gradients of these batches, which then reads those wanted next.

        The model changes when the result is waited for. With ``later``, gradients are summed
        meanwhile, otherwise then.
        """
        comm, stream = self._comm, self._stream(numbers, gradient)
        if comm is None:
            return lambda: self._finish(stream, rate, wanted)

        def run() -> SparseStream:
            return comm.call(STEP, lambda: self._sum(stream))

        wait = comm.submit(run).wait if later else run
        return lambda: self._finish(self.clock.timed(wait), rate, wanted)

    def whole(self, everywhere: bool = True) -> WholeModel:
        """Return the whole model, which is this one."""
        return self._model

    def state(self) -> dict[str, Array]:
        """Return what a later training needs to go on from here, debts included; all ranks call."""
        if self._owed is None or self._comm is None:
            return self.weights.state()
        return {**self.weights.state(), **self._owed.state(self._comm)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take over what rank 0 gives of `BY_COLUMN`, and debts; all ranks call."""
        for name, own in self.weights.by_column().items():
            own[...] = broadcast(arrays.get(name), self._comm).reshape(own.shape)
        if self._owed is not None and self._comm is not None:
            self._owed.restore(arrays, self._comm)

    def _stream(self, numbers: BatchNumbers, gradient: Array) -> SparseStream:
        """Return what is sent of a gradient, with its tail; nothing if there is no batch."""
        number, weights = numbers[self._rank], self.weights
        size = weights.dimensions + TAIL
        columns = torch.empty(0, dtype=index_dtype(size))
        if number is not None:
            columns = self._batches[number].columns
        shape = (-1,) if weights.width == 1 else (-1, weights.width)
        values = torch.from_numpy(gradient[: len(columns)]).view(shape)
        if self._owed is not None and number is not None:
            sent, taken = self._owed.take(columns[:-TAIL], values[:-TAIL])
            columns, values = torch.cat([sent, columns[-TAIL:]]), torch.cat([taken, values[-TAIL:]])
        return SparseStream.unchecked(columns, values, size)

    def _sum(self, stream: SparseStream) -> SparseStream:
        """Return the sum of all ranks' streams, inside a job of the communicator."""
        assert self._comm is not None, "one alone has nothing to sum"
        algorithm, format, max_nnz, _, rounding = self._exchange
        if rounding is None:
            wire = Wire(self._comm, Format(format))
            return auto.all_reduce(stream, wire, algorithm=algorithm, max_nnz=max_nnz)
        size = self.weights.dimensions
        values, tail = stream.split([0, size, size + TAIL])
        wire = Wire(self._comm, Format(format, rounding), self.weights.steps)
        rounded = split_allgather(values, wire, max_nnz=max_nnz)
        if self._owed is not None:
            for start, lost in wire.take_lost():
                self._owed.give_back(lost.placed(start, size))
        tails = auto.all_reduce(tail, Wire(self._comm), algorithm="allgather", max_nnz=TAIL)
        return concatenate([rounded, tails])

    def _finish(self, total: SparseStream, rate: float, wanted: BatchNumbers) -> StepResult:
        values = total.values.numpy().reshape(-1, self.weights.width)
        columns = None if total.indices is None else total.indices.numpy()[:-TAIL]
        tail = values[-TAIL:].astype(np.float64)
        self.weights.step(columns, values[:-TAIL], tail, rate)
        return StepResult(tail, self.read(wanted))
