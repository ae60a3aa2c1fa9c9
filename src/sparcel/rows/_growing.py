"""Arrays of unknown length."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from sparcel.rows.rows import Array

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
