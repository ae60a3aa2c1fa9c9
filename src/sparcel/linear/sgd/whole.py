"""A whole model: the coordinates that can be other than zero, wherever they were trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparcel.errors import optional
from sparcel.linear.sgd.weights import BY_COLUMN, Weights
from sparcel.rows.rows import Array


@dataclass(frozen=True)
class Whole:
    """A whole model, by the columns that occur.

    Attributes
    ----------
    weights
        One coordinate for each of the columns.
    columns
        ``[count]`` in any order; None for all columns in turn. All other coordinates are zero.
    dimensions
        Number of columns of the data.
    """

    weights: Weights
    columns: Array | None
    dimensions: int

    def coordinates(self) -> tuple[Array | None, Array, Array]:
        """Return the columns, increasing, their coordinates ``[count, width]``, and intercepts."""
        values, intercepts = self.weights.read()
        if self.columns is None or (self.columns[1:] > self.columns[:-1]).all():
            return self.columns, values, intercepts
        order = np.argsort(self.columns)
        return self.columns[order], values[order], intercepts

    def read(self) -> tuple[Array, Array]:
        """Return all coordinates ``[dimensions, width]`` and the intercepts ``[width]``."""
        values, intercepts = self.weights.read()
        return self._spread(values), intercepts

    def read_sparse(self) -> tuple[Any, Array]:
        """Return the coordinates as a sparse matrix ``[width, dimensions]``, and the intercepts."""
        with optional("sparcel.linear", "linear"):
            import scipy.sparse as sp
        columns, values, intercepts = self.coordinates()
        assert columns is not None
        width, starts = values.shape[1], np.arange(values.shape[1] + 1) * len(values)
        entries = np.ravel(values.T), np.tile(columns, width), starts
        return sp.csr_matrix(entries, (width, self.dimensions)), intercepts

    def is_like(self, arguments: Mapping[str, Any]) -> bool:
        """Tell whether `Weights` of these arguments have the same shape, dtype and settings."""
        return {**self.weights.settings, "dimensions": self.dimensions} == arguments

    def expanded(self) -> Weights:
        """Return the same with a coordinate for every column."""
        if self.columns is None:
            return self.weights
        state: Mapping[str, Array] = self.weights.state()
        weights = Weights(**{**self.weights.settings, "dimensions": self.dimensions})
        weights.restore(
            {name: self._spread(a) if name in BY_COLUMN else a for name, a in state.items()}
        )
        return weights

    def _spread(self, values: Array) -> Array:
        if self.columns is None:
            return values
        found = np.zeros((self.dimensions, *values.shape[1:]), values.dtype)
        found[self.columns] = values
        return found
