"""Rows arranged in batches, column by column, once for all epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.kernels import index_dtype
from sparcel.linear.sgd.numbering import Numbering
from sparcel.linear.threads import threads_for
from sparcel.rows import Rows
from sparcel.rows.rows import Array

MOST_ROWS = 1 << 15
"""The most rows of a batch: an entry's row and a flag take 16 bits."""

TAIL = 3
"""Coordinates of a gradient beyond the model's: of the intercept, the rows' weight, their loss."""

_ENTRY_NS = 2
"""How long an entry takes a step, about."""

_PIECE = 1 << 20
"""Entries that are copied at a time, about."""


@dataclass(frozen=True)
class Batch:
    """What a rank takes one step with.

    Attributes
    ----------
    entries
        The rows, by columns, with their targets and weights.
    columns
        ``[count + TAIL]`` the columns that occur, increasing, then those of the tail.
    rows, nnz
        Number of rows, and of their entries.
    weight
        Sum of the rows' weights.
    """

    entries: _cpu.LinearBatch
    columns: Tensor
    rows: int
    nnz: int
    weight: float

    def gradient(self, coordinates: Array, intercept: Array, loss: str, out: Array) -> None:
        """Write the sum of the rows' gradients, and the tail's values.

        Parameters
        ----------
        coordinates
            ``[count, width]`` those of the model at the batch's columns.
        intercept
            ``[width]`` of the model.
        out
            ``[count + TAIL, width]``: the gradient, that of the intercepts, the rows' weight and
            the sum of their losses.
        """
        width, threads = len(intercept), threads_for(_ENTRY_NS * self.nnz * len(intercept))
        derivatives = np.empty((self.rows, width), out.dtype)
        totals = self.entries.differentiate(
            coordinates, loss, intercept.tolist(), derivatives, threads
        )
        self.entries.gradient(derivatives, width, out, threads)
        out[-3], out[-2], out[-1] = totals[width:], self.weight, totals[:width]


def arrange(
    rows: Rows,
    targets: Array,
    weights: Array | None,
    size: int,
    order: Array,
    numbering: Numbering | None = None,
) -> list[Batch]:
    """Arrange rows in batches of at most ``size`` rows, as equal as possible.

    The rows are copied piece by piece, so that little more is in memory than they and the batches.

    Parameters
    ----------
    rows
        All of a rank's rows.
    targets
        ``[rows]`` in the dtype of the rows' values: 1 and -1, numbers of classes, or any numbers.
    weights
        ``[rows]`` in the same dtype, or None where every row counts 1.
    size
        In [1, `MOST_ROWS`].
    order
        ``[rows]`` int64, the order in which the batches take the rows.
    numbering
        What stands for the columns in the batches; None for themselves.
    """
    count = -(-len(rows) // size)
    bounds = [batch * len(rows) // max(count, 1) for batch in range(count + 1)]
    entries = np.concatenate([[0], np.cumsum(np.diff(rows.offsets)[order])])[bounds]
    batches: list[Batch] = []
    for _, piece in groupby(range(count), lambda batch: entries[batch] // _PIECE):
        own = bounds[len(batches) : len(batches) + len(list(piece)) + 1]
        taken = order[own[0] : own[-1]]
        part = rows.take(taken)
        if numbering is not None:
            part = numbering.numbered(part)
        heavy = None if weights is None else weights[taken]
        batches += _arranged(part, targets[taken], heavy, [end - own[0] for end in own])
    return batches


def _arranged(
    rows: Rows, targets: Array, weights: Array | None, bounds: Sequence[int]
) -> Iterator[Batch]:
    """Arrange rows in batches that end at these bounds."""
    given = rows.columns.astype(column_dtype(rows.dimensions), copy=False)
    columns = np.empty_like(given)
    places = np.empty(rows.nnz, np.uint16)
    values = np.empty_like(rows.values)
    counts = _cpu.by_columns(
        *(rows.offsets, given, rows.values, bounds, columns, places, values),
        threads=torch.get_num_threads(),
    )
    tail = np.arange(rows.dimensions, rows.dimensions + TAIL, dtype=columns.dtype)
    for count, (first, last) in zip(counts, pairwise(bounds), strict=True):
        start, end = rows.offsets[first], rows.offsets[last]
        own = np.concatenate([columns[start : start + count], tail])
        heavy = None if weights is None else weights[first:last]
        entries = _cpu.LinearBatch(
            own[:-TAIL], places[start:end], values[start:end], targets[first:last], heavy
        )
        weight = float(last - first if heavy is None else heavy.sum(dtype=np.float64))
        yield Batch(entries, torch.from_numpy(own), last - first, int(end - start), weight)


def column_dtype(dimensions: int) -> str:
    """Name the dtype of a batch's columns, which also count its tail."""
    return str(index_dtype(dimensions + TAIL)).removeprefix("torch.")


def most_entries(batches: Sequence[Batch]) -> int:
    """Return the most coordinates of any batch's gradient."""
    return max((len(batch.columns) for batch in batches), default=TAIL)
