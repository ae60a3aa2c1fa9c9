"""Numbers for the columns that occur, the frequent ones first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sparcel.rows import Rows
from sparcel.rows.rows import Array

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
