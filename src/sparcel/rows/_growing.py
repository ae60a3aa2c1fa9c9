"""Arrays of unknown length, and rows of unknown number."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import DTypeLike

from sparcel.errors import InputError
from sparcel.rows.rows import Array, Rows

MOST_INT32 = 2**31 - 1

SEGMENT = 1 << 24
"""Entries of a segment: so many that its memory goes back to the system when it is freed."""


class Growing:
    """An array that others are appended to, and that is never in memory twice.

    Many small arrays would be, when they are joined: malloc keeps their memory for later ones.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._segments: list[Array] = []
        self.length = 0

    def extend(self, other: Array) -> None:
        """Append an array."""
        while len(other):
            used = self.length % SEGMENT
            if used == 0:
                self._segments.append(np.empty(SEGMENT, self._dtype))
            fitting = other[: SEGMENT - used]
            self._segments[-1][used : used + len(fitting)] = fitting
            self.length += len(fitting)
            other = other[len(fitting) :]

    def take(self) -> Array:
        """Return all as one array, and free the segments on the way."""
        whole = np.empty(self.length, self._dtype)
        for place in range(0, self.length, SEGMENT):
            whole[place : place + SEGMENT] = self._segments.pop(0)[: self.length - place]
        return whole


def join(parts: Iterable[Rows], dimensions: int | None, none: Array | None) -> Rows:
    """Join blocks of rows as they come, so that they are in memory once.

    Parameters
    ----------
    dimensions
        Of the result; None for the most of any block.
    none
        The labels of no rows at all.
    """
    wide = dimensions is not None and dimensions > MOST_INT32
    offsets, values = Growing(np.int64), Growing(np.float32)
    columns = Growing(np.int64 if wide else np.int32)
    offsets.extend(np.zeros(1, np.int64))
    labels: list[Array] = []
    highest = 0
    for part in parts:
        offsets.extend(part.offsets[1:] + columns.length)
        columns.extend(part.columns)
        values.extend(part.values)
        labels += [] if part.labels is None else [part.labels]
        highest = max(highest, part.dimensions)
    if len({one.dtype.kind for one in labels}) > 1:
        raise InputError("labels are numbers in some of these rows, and texts in others")
    found = np.concatenate(labels) if labels else none
    return Rows(offsets.take(), columns.take(), values.take(), dimensions or highest, found)
