"""A model that every rank holds, changed by sums that lose something: few coordinates, or bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparcel import auto
from sparcel.collectives.split_allgather import split_allgather
from sparcel.comm import Communicator
from sparcel.formats import FewBits, Format
from sparcel.linear.sgd.batches import TAIL, Batch
from sparcel.linear.sgd.owed import Owed
from sparcel.linear.sgd.replicated import BatchNumbers, Replicated
from sparcel.linear.sgd.weights import Weights
from sparcel.rows.rows import Array
from sparcel.stream import SparseStream, concatenate
from sparcel.wire import Wire


class Lossy(Replicated):
    """A whole model on every rank, and gradients of which a step sends a part, or few bits.

    The tail is sent as it is.

    Parameters
    ----------
    count
        How many columns of its gradient and of what it owes a rank sends a step; None for all of
        its batch. It owes the rest, and what rounding takes.
    rounding
        What rounds the values that are sent, and their sum, without bias; None for nothing.
        Without ``count`` what it takes is lost.

    The others are those of `Replicated`.
    """

    def __init__(
        self,
        weights: Weights,
        batches: Sequence[Batch],
        comm: Communicator,
        exchange: Mapping[str, Any],
        count: int | None,
        rounding: FewBits | None,
    ) -> None:
        super().__init__(weights, batches, comm, exchange)
        self._ranks, self._rounding = comm, rounding
        self._owed = None if count is None else Owed(weights, count)

    def state(self) -> dict[str, Array]:
        """See `Replicated.state`; the ranks' own debts are part of it."""
        owed = {} if self._owed is None else self._owed.state(self._ranks)
        return {**super().state(), **owed}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """See `Replicated.restore`."""
        super().restore(arrays)
        if self._owed is not None:
            self._owed.restore(arrays, self._ranks)

    def _stream(self, numbers: BatchNumbers, gradient: Array) -> SparseStream:
        """Return what is sent of a gradient, with its tail; the rest is owed."""
        whole = super()._stream(numbers, gradient)
        if self._owed is None or whole.nnz == 0:
            return whole
        assert whole.indices is not None, "a batch has columns"
        columns, values = self._owed.take(whole.indices[:-TAIL], whole.values[:-TAIL])
        return SparseStream.unchecked(
            torch.cat([columns, whole.indices[-TAIL:]]),
            torch.cat([values, whole.values[-TAIL:]]),
            whole.size,
        )

    def _sum(self, stream: SparseStream) -> SparseStream:
        if self._rounding is None:
            return super()._sum(stream)
        size = self.weights.dimensions
        values, tail = stream.split([0, size, size + TAIL])
        format = Format(self._exchange["format"], self._rounding)
        wire = Wire(self._ranks, format, self.weights.steps)
        rounded = split_allgather(values, wire, max_nnz=self._exchange["max_nnz"])
        if self._owed is not None:
            for start, lost in wire.take_lost():
                self._owed.give_back(lost.placed(start, size))
        tails = auto.all_reduce(tail, Wire(self._ranks), algorithm="allgather", max_nnz=TAIL)
        return concatenate([rounded, tails])
