"""A whole model of SGD, put together from wherever its coordinates are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparcel.linear.coordinates import Coordinates, spread
from sparcel.linear.sgd.weights import BY_COLUMN, Weights
from sparcel.rows.rows import Array


@dataclass(frozen=True)
class WholeModel:
    """A whole model in training, by the columns that occur.

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

    def coordinates(self) -> Coordinates:
        """Return its coordinates, with all regularisation applied."""
        columns, (values, intercepts) = self.columns, self.weights.read()
        if columns is not None and (columns[1:] < columns[:-1]).any():
            order = np.argsort(columns)
            columns, values = columns[order], values[order]
        return Coordinates(columns, values, intercepts, self.dimensions)

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
            {
                name: spread(array, self.columns, self.dimensions) if name in BY_COLUMN else array
                for name, array in state.items()
            }
        )
        return weights
