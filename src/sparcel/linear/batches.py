"""Rows arranged in batches, column by column, once for all epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.kernels import index_dtype
from sparcel.rows import Rows
from sparcel.rows.rows import Array

MOST_ROWS = 1 << 15
"""The most rows of a batch: an entry's row and a flag take 16 bits."""

TAIL = 3
"""Coordinates of a gradient beyond the model's: of the intercept, the rows' weight, their loss."""


@dataclass(frozen=True)
class Batch:
    """What a rank takes one step with.

    Attributes
    ----------
    entries
        The rows, by columns, with their targets and weights.
    columns
        ``[count + TAIL]`` the columns that occur, increasing, then those of the tail.
    rows
        Number of rows.
    weight
        Sum of the rows' weights.
    """

    entries: _cpu.LinearBatch
    columns: Tensor
    rows: int
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
        width, threads = len(intercept), torch.get_num_threads()
        derivatives = np.empty((self.rows, width), out.dtype)
        totals = self.entries.differentiate(
            coordinates, loss, intercept.tolist(), derivatives, threads
        )
        self.entries.gradient(derivatives, width, out, threads)
        out[-3], out[-2], out[-1] = totals[width:], self.weight, totals[:width]


def arrange(
    rows: Rows, targets: Array, weights: Array | None, size: int, order: Array
) -> list[Batch]:
    """Arrange rows in batches of at most ``size`` rows, as equal as possible.

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
    """
    if len(rows) == 0:
        return []
    count = -(-len(rows) // size)
    bounds = [batch * len(rows) // count for batch in range(count + 1)]
    # What is not written takes no memory.
    given = rows.columns.astype(column_dtype(rows.dimensions), copy=False)
    columns = np.empty(rows.nnz + TAIL * count, given.dtype)
    places = np.empty(rows.nnz, np.uint16)
    values = np.empty(rows.nnz, rows.values.dtype)
    counts = _cpu.by_columns(
        *(rows.offsets, given, rows.values, order, bounds, columns, places, values),
        tail=TAIL,
        threads=torch.get_num_threads(),
    )
    targets = np.ascontiguousarray(targets[order])
    weights = None if weights is None else np.ascontiguousarray(weights[order])
    ends = np.cumsum(np.diff(rows.offsets)[order])
    tail = np.arange(rows.dimensions, rows.dimensions + TAIL, dtype=columns.dtype)
    batches, entry = [], 0
    for number, (first, last) in enumerate(pairwise(bounds)):
        end, start = int(ends[last - 1]), entry + TAIL * number
        own = columns[start : start + counts[number] + TAIL]
        own[-TAIL:] = tail
        heavy = None if weights is None else weights[first:last]
        entries = _cpu.LinearBatch(
            own[:-TAIL], places[entry:end], values[entry:end], targets[first:last], heavy
        )
        weight = float(last - first if heavy is None else heavy.sum(dtype=np.float64))
        batches.append(Batch(entries, torch.from_numpy(own), last - first, weight))
        entry = end
    return batches


def column_dtype(dimensions: int) -> str:
    """Name the dtype of a batch's columns, which also count its tail."""
    return str(index_dtype(dimensions + TAIL)).removeprefix("torch.")


def most_entries(batches: Sequence[Batch]) -> int:
    """Return the most coordinates of any batch's gradient."""
    return max((len(batch.columns) for batch in batches), default=TAIL)
