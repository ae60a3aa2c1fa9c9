"""A model that one process trains alone: only the columns that occur, the frequent ones first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparcel.linear.batches import TAIL, Batch
from sparcel.linear.replicated import Numbers, Pending, Point, Stepped
from sparcel.linear.weights import Weights, part_of, whole_of
from sparcel.rows.rows import Array

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

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take what belongs to these columns out of the state of a whole model."""
        self.weights.restore(part_of(state, self._columns))
