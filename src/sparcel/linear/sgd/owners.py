"""Who owns which columns of a sharded model, and what the ranks tell the owners once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from sparcel.comm import Call, Communicator
from sparcel.linear.ranks import exchanged, gathered
from sparcel.linear.sgd.batches import column_dtype
from sparcel.rows.rows import Array

_TELL = Call.of("tell owners", {})

_BINS = 4096
"""Ranges of columns whose use is counted to find owners that have about equally much to do."""


@dataclass(frozen=True)
class RequestedColumns:
    """Which of this owner's columns the batches of one rank have.

    Attributes
    ----------
    columns
        Batch after batch, increasing in each.
    bounds
        Where each batch's begin in ``columns``, and the end.
    """

    columns: Array
    bounds: Sequence[int]

    def numbered(self, columns: Array) -> RequestedColumns:
        """Return the same with the places of these among ``columns``, which are sorted."""
        return RequestedColumns(
            np.searchsorted(columns, self.columns).astype(np.int32), self.bounds
        )

    def of(self, number: int | None) -> Array:
        """Return the columns of a batch; none if there is no batch."""
        if number is None:
            return self.columns[:0]
        return self.columns[self.bounds[number] : self.bounds[number + 1]]


def owners(own: Sequence[Array], dimensions: int, comm: Communicator) -> list[int]:
    """Return where each owner's columns begin, and the end: about equally many uses for each."""
    edges = np.linspace(0, dimensions, min(_BINS, dimensions) + 1).astype(np.int64)
    uses = np.zeros(len(edges) - 1, np.int64)
    for columns in own:
        uses += np.diff(np.searchsorted(columns, edges))
    total = np.cumsum(np.sum(gathered(comm, (uses + 1).tolist(), "uses of columns"), axis=0))
    shares = total[-1] * np.arange(1, comm.size) / comm.size
    return [0, *edges[1 + np.searchsorted(total, shares)].tolist(), dimensions]


def tell_owners(
    own: Sequence[Array], cuts: Sequence[Sequence[int]], dimensions: int, comm: Communicator
) -> list[RequestedColumns]:
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
        What each rank asks of this owner.
    """
    pieces = [
        [columns[cut[owner] : cut[owner + 1]] for columns, cut in zip(own, cuts, strict=True)]
        for owner in range(comm.size)
    ]
    counts = np.array([[len(piece) for piece in part] for part in pieces], np.int64)
    batches = gathered(comm, len(own), "number of batches")
    none = np.zeros(0, column_dtype(dimensions))

    def tell() -> list[RequestedColumns]:
        told = exchanged(counts.reshape(-1), [len(own)] * comm.size, batches, comm)
        counts_of = np.split(told, np.cumsum(batches)[:-1])
        columns = np.concatenate([none, *chain.from_iterable(pieces)])
        leaving, arriving = ([int(one.sum()) for one in each] for each in (counts, counts_of))
        arrived = np.split(exchanged(columns, leaving, arriving, comm), np.cumsum(arriving)[:-1])
        return [
            RequestedColumns(part, [0, *accumulate(numbers.tolist())])
            for part, numbers in zip(arrived, counts_of, strict=True)
        ]

    return comm.call(_TELL, tell)
