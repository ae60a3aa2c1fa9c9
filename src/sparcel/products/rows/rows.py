"""Labelled sparse rows: what linear models are fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparcel.errors import InputError

Array = NDArray[Any]

MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Rows:
    """A sparse matrix by rows (CSR), and a label for each row where labels are known.

    Attributes
    ----------
    offsets
        ``[rows + 1]`` int64; row i has the entries ``offsets[i]`` to ``offsets[i + 1]``.
    columns
        ``[nnz]`` int32, or int64 if the dimensions need it; increasing within each row.
    values
        ``[nnz]`` float32 or float64.
    dimensions
        Number of columns of the matrix.
    labels
        ``[rows]`` of any dtype, or None.
    """

    offsets: Array
    columns: Array
    values: Array
    dimensions: int
    labels: Array | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return len(self.columns)

    def slice(self, start: int, stop: int) -> Self:
        """Return the rows in ``[start, stop)``, as views of these."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return type(self)(
            self.offsets[start : stop + 1] - first,
            self.columns[first:last],
            self.values[first:last],
            self.dimensions,
            None if self.labels is None else self.labels[start:stop],
        )

    def take(self, rows: Array) -> Self:
        """Return copies of the rows with these numbers, in this order."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        entries = np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        entries += np.arange(offsets[-1])
        return type(self)(
            offsets,
            self.columns[entries],
            self.values[entries],
            self.dimensions,
            None if self.labels is None else self.labels[rows],
        )

    def among(self, columns: Array) -> Self:
        """Return the rows' entries in some columns, increasing, by their places among these."""
        places = np.searchsorted(columns, self.columns)
        kept = np.append(columns, -1)[places] == self.columns
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])[self.offsets]
        return type(self)(offsets, places[kept], self.values[kept], len(columns), self.labels)


def join(blocks: Iterable[Rows], dimensions: int | None, none: Array | None) -> Rows:
    """Join blocks that were read, of float32 values.

    Parameters
    ----------
    dimensions
        Of the result; None for the most of any block.
    none
        The labels of no rows at all.
    """
    parts = list(blocks)
    highest = dimensions or max((part.dimensions for part in parts), default=0)
    if parts:
        return concatenate([replace(part, dimensions=highest) for part in parts])
    columns = np.zeros(0, np.int32 if highest <= MOST_INT32 else np.int64)
    return Rows(np.zeros(1, np.int64), columns, np.zeros(0, np.float32), highest, none)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Join rows end to end; all have the same dimensions, and labels or none.

    Raises
    ------
    InputError
        When there are no parts, or they differ in their dimensions or in having labels.
    """
    if not parts:
        raise InputError("concatenate needs at least one part, got none")
    first = parts[0]
    for other in parts[1:]:
        if other.dimensions != first.dimensions:
            raise InputError(
                f"rows of {first.dimensions} and of {other.dimensions} dimensions do not go"
                " together"
            )
        if (other.labels is None) != (first.labels is None):
            raise InputError("some of these rows have labels, and some have none")
        if _kind(other) != _kind(first):
            raise InputError("labels are numbers in some of these rows, and texts in others")
    if len(parts) == 1:
        return first
    starts = np.cumsum([0, *(part.nnz for part in parts[:-1])])
    ends = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=True)]
    labels = [part.labels for part in parts if part.labels is not None]
    return Rows(
        np.concatenate([np.zeros(1, np.int64), *ends]),
        np.concatenate([part.columns for part in parts]),
        np.concatenate([part.values for part in parts]),
        first.dimensions,
        np.concatenate(labels) if labels else None,
    )


def check(rows: Rows) -> None:
    """Raise an `InputError` unless offsets and columns can be used as they are.

    What was mapped from a file may hold anything.
    """
    offsets, columns = rows.offsets, rows.columns
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(columns):
        raise InputError(f"offsets of rows must go from 0 to their {len(columns)} entries")
    if len(columns) != len(rows.values) or (np.diff(offsets) < 0).any():
        raise InputError("offsets of rows must not decrease, and each column needs its value")
    if len(columns) and not 0 <= columns.min() <= columns.max() < rows.dimensions:
        raise InputError(
            f"columns must lie in [0, {rows.dimensions}), got {columns.min()} to {columns.max()}"
        )


def _kind(rows: Rows) -> str:
    kind = "" if rows.labels is None else rows.labels.dtype.kind
    return "number" if kind in "biuf" else kind
