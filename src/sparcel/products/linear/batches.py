"""Rows arranged in batches, column by column, once for all epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.core.kernels import index_dtype
from sparcel.products.rows import Rows
from sparcel.products.rows.rows import Array

_WORTH_NS = 300_000
"""What a thread must have to do: to wake it takes tens of microseconds."""


def threads_for(nanoseconds: float) -> int:
    """Return the threads of a kernel that takes one thread so long: torch's, or fewer."""
    return max(1, min(torch.get_num_threads(), int(nanoseconds / _WORTH_NS)))


_TABLE = 8
"""With more dimensions for each entry, columns are sorted, where a table would be too large."""

_CHUNK = 1 << 22
"""Entries that are counted at a time: numpy takes several copies of them."""


@dataclass(frozen=True)
class Numbering:
    """Which number stands for which column.

    Frequent columns have low numbers: what a batch visits then lies mostly together.

    Attributes
    ----------
    columns
        ``[count]``: the column of each number.
    """

    columns: Array
    _sorted: Array | None
    _numbers: Array

    def numbered(self, rows: Rows) -> Rows:
        """Return rows with numbers for columns, which do not increase within a row."""
        if self._sorted is None:
            numbers = self._numbers[rows.columns]
        else:
            found, places = np.unique(rows.columns, return_inverse=True)
            numbers = self._numbers[np.searchsorted(self._sorted, found)][places]
        return replace(rows, columns=numbers, dimensions=len(self.columns))


def by_frequency(rows: Rows) -> Numbering:
    """Give numbers to the columns that occur, the most frequent first."""
    if rows.dimensions <= _TABLE * rows.nnz:
        counts = np.zeros(rows.dimensions, np.int32)
        for part in _chunks(rows):
            np.add.at(counts, part, np.int32(1))
        columns = np.flatnonzero(counts).astype(rows.columns.dtype)
        columns = columns[np.argsort(-counts[columns], kind="stable")]
        numbers = counts  # one vector of the model's size, not two
        numbers[columns] = np.arange(len(columns), dtype=np.int32)
        return Numbering(columns, None, numbers)
    columns, found = np.zeros(0, rows.columns.dtype), np.zeros(0, np.int64)
    for part in _chunks(rows):
        new, more = np.unique(part, return_counts=True)
        columns, places = np.unique(np.concatenate([columns, new]), return_inverse=True)
        found = np.bincount(places, np.concatenate([found, more])).astype(np.int64)
    order = np.argsort(-found, kind="stable")
    numbers = np.empty(len(order), np.int32)
    numbers[order] = np.arange(len(order), dtype=np.int32)
    return Numbering(columns[order], columns, numbers)


def _chunks(rows: Rows) -> Iterator[Array]:
    return (rows.columns[start : start + _CHUNK] for start in range(0, rows.nnz, _CHUNK))


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
