"""A model that one process trains alone: only the columns that occur, the frequent ones first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sparcel.linear.batches import TAIL, Batch
from sparcel.linear.replicated import Numbers, Pending, Point, Stepped
from sparcel.linear.weights import Weights, part_of, whole_of
from sparcel.rows import Rows
from sparcel.rows.rows import Array

_MOST_COUNTED = 1 << 31
"""With more dimensions, columns are sorted to be counted."""

_CHUNK = 1 << 25
"""Entries that are counted at a time: numpy takes a copy of them."""


class Alone:
    """A model of the columns that occur in some rows.

    Frequent columns share cache lines, so most of what a batch visits lies together. All other
    coordinates are zero and stay zero.

    Parameters
    ----------
    settings
        Arguments of the whole model's `Weights`.
    columns
        ``[count]``: the column of each coordinate here.
    batches
        The rows, whose columns are numbered as here.
    """

    seconds = 0.0
    """There is nobody to wait for."""

    def __init__(
        self, settings: Mapping[str, Any], columns: Array, batches: Sequence[Batch]
    ) -> None:
        self._settings, self._columns, self._batches = dict(settings), columns, batches
        self.weights = Weights(**{**self._settings, "dimensions": len(columns)})

    def read(self, numbers: Numbers) -> Point | None:
        """Return the model as the batch sees it."""
        number = numbers[0]
        if number is None:
            return None
        coordinates = self.weights.read_at(self._batches[number].columns[:-TAIL])
        return Point(coordinates, self.weights.intercept.copy())

    def step(self, numbers: Numbers, gradient: Array, rate: float, wanted: Numbers) -> Stepped:
        """Take a step with the gradient of a batch, and read the one that is wanted next."""
        number = numbers[0]
        assert number is not None
        columns = self._batches[number].columns.numpy()[:-TAIL]
        tail = gradient[-TAIL:].astype(np.float64)
        self.weights.step(columns, gradient[:-TAIL], tail, rate)
        return Stepped(tail, self.read(wanted))

    def start(self, numbers: Numbers, gradient: Array, rate: float, wanted: Numbers) -> Pending:
        """Return what does a step when it is waited for."""
        return lambda: self.step(numbers, gradient, rate, wanted)

    def whole(self) -> Weights:
        """Return the whole model."""
        return whole_of(self.weights.state(), self._columns, self._settings)

    def state(self) -> dict[str, Array]:
        """Return what a later training needs to go on from here."""
        return self.whole().state()

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take what belongs to these columns out of the state of a whole model."""
        self.weights.restore(part_of(state, self._columns))


def by_frequency(rows: Rows) -> tuple[Array, Rows]:
    """Give numbers to the columns that occur, the most frequent first.

    Returns
    -------
    tuple
        The column of each number, and the rows with numbers for columns, which do not increase
        within a row.
    """
    if rows.dimensions > _MOST_COUNTED:
        columns, places, counts = np.unique(rows.columns, return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        numbers = np.empty(len(order), np.int32)
        numbers[order] = np.arange(len(order), dtype=np.int32)
        return columns[order], replace(rows, columns=numbers[places], dimensions=len(order))
    counts = np.zeros(rows.dimensions, np.int32)
    for start in range(0, rows.nnz, _CHUNK):
        part = rows.columns[start : start + _CHUNK]
        counts += np.bincount(part, minlength=rows.dimensions).astype(np.int32)
    columns = np.flatnonzero(counts)
    columns = columns[np.argsort(-counts[columns], kind="stable")]
    numbers = np.zeros(rows.dimensions, np.int32)
    numbers[columns] = np.arange(len(columns), dtype=np.int32)
    return columns, replace(rows, columns=numbers[rows.columns], dimensions=len(columns))
