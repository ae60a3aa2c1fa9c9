"""The coordinates of a linear model, wherever they were trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparcel.errors import InputError, optional
from sparcel.rows.rows import Array

MOST_HELD = 2**31 - 1
"""A model of more dimensions is never held whole, but as the columns that occur."""


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Coordinates and intercepts of a model, by the columns that can be other than zero.

    Attributes
    ----------
    columns
        ``[count]``, increasing; None for all columns. All other coordinates are zero.
    values
        ``[count, width]``, width 1 for two classes and for regression.
    intercepts
        ``[width]``.
    dimensions
        Number of columns of the data.
    """

    columns: Array | None
    values: Array
    intercepts: Array
    dimensions: int

    def check(self) -> None:
        """Raise an `InputError` unless all of them are finite: the last step may be too large."""
        for found in (self.values, self.intercepts):
            if not np.isfinite(found).all():
                raise InputError(
                    f"the model became {found[~np.isfinite(found)][0]} in the last epoch: lower"
                    " eta0, or scale the data"
                )

    def dense(self) -> Array:
        """Return all coordinates, ``[dimensions, width]``."""
        return spread(self.values, self.columns, self.dimensions)

    def sparse(self) -> Any:
        """Return a sparse matrix ``[width, dimensions]``; the columns are known."""
        with optional("sparcel.linear", "linear"):
            import scipy.sparse as sp
        assert self.columns is not None
        count, width = self.values.shape
        starts = np.arange(width + 1) * count
        entries = np.ravel(self.values.T), np.tile(self.columns, width), starts
        return sp.csr_matrix(entries, (width, self.dimensions))


def spread(values: Array, columns: Array | None, dimensions: int) -> Array:
    """Return the rows of all columns: ``values`` at some, zero at all others."""
    if columns is None:
        return values
    found = np.zeros((dimensions, *values.shape[1:]), values.dtype)
    found[columns] = values
    return found
