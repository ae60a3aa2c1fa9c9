"""A linear model in training: steps touch only the coordinates of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from torch import Tensor

from sparcel import _cpu
from sparcel.errors import InputError
from sparcel.products.linear.batches import threads_for
from sparcel.products.linear.inputs import MOST_HELD
from sparcel.products.linear.model import Coordinates, spread
from sparcel.products.rows.rows import Array

_ARRAYS = ("rows", "sums", "intercept", "intercept_squares", "intercept_sums")

BY_COLUMN = ("rows", "sums")
"""What of a state has a row for each coordinate."""

ONCE = ("counts", "intercept", "intercept_squares", "intercept_sums")
"""What of a state is small, and the same on all ranks."""

_VISIT_NS = 8
"""How long a visit to a coordinate takes, about."""

_CHUNK = 1 << 18
"""Coordinates whose average is read at a time."""

_LEAST_SCALE = 1e-6
"""Below this the scale is multiplied into the coordinates, before precision suffers."""


@dataclass(eq=False, repr=False)
class Weights:
    """The coordinates and intercepts of a model, and what their steps need to remember.

    Regularisation changes all coordinates in every step. It is applied to a coordinate when a
    gradient next touches it, and by whoever reads it.

    Parameters
    ----------
    dimensions
        Number of columns of the data.
    width
        Number of classes that are told from the rest, 1 for two classes and for regression.
    l1, l2
        The model minimises the mean loss + l1 · |w|₁ + l2 / 2 · |w|₂². Intercepts are left out.
    adaptive
        Whether steps are divided by the root of the coordinate's squared gradients (AdaGrad).
    average
        Whether `read` returns the average of the models after each step. Needs l1 = 0.
    dtype
        float32 or float64.
    fits_intercept
        Whether the model has intercepts.
    """

    dimensions: int
    width: int = 1
    l1: float = 0.0
    l2: float = 0.0
    adaptive: bool = False
    average: bool = False
    dtype: Any = np.float32
    fits_intercept: bool = True

    def __post_init__(self) -> None:
        if self.dimensions > MOST_HELD:
            raise InputError(
                f"a model of {self.dimensions} dimensions can't be held whole, as partial_fit does"
                " and every rank that sums all gradients: call fit, with algorithm='sharded'"
            )
        self.dtype = np.dtype(self.dtype)
        count, width, dtype = self.dimensions, self.width, self.dtype
        settles = self.l1 > 0 or (self.adaptive and self.l2 > 0)
        self._adapts_and_settles = self.adaptive and settles
        self.rows = _zeros((count, (2 if self.adaptive else 1) * width + settles), dtype)
        self.sums = _zeros((count, width), dtype) if self.average else None
        self.intercept, self.intercept_squares, self.intercept_sums = np.zeros((3, width))
        self.steps, self.scales, self.spread = 0, 0.0, 1.0
        self._model = _cpu.LinearModel(self.rows, width, self.adaptive, self.l1, self.l2)

    def read_at(self, columns: Array | Tensor) -> Array:
        """Return the coordinates at some columns, ``[count, width]``."""
        out = np.empty((len(columns), self.width), self.dtype)
        self._model.read_at(columns, out, threads_for(_VISIT_NS * out.size))
        return out

    def step(self, columns: Array | None, values: Array, tail: Array, rate: float) -> None:
        """Take a step against the sum of all ranks' gradients, divided by their rows' weight.

        Parameters
        ----------
        columns
            ``[count]`` increasing, or None for all.
        values
            ``[count, width]`` the gradient at these columns.
        tail
            ``[TAIL, width]`` float64: what `Batch.gradient` appends, summed over ranks.
        rate
            The size of the step.
        """
        factor, threads = self._factor(tail), threads_for(_VISIT_NS * values.size)
        self._model.step(columns, values, factor, rate, self.sums, self._past, threads)
        self._finish(tail[0] * factor, rate)

    def step_sum(
        self,
        columns: Array,
        bounds: Sequence[int],
        values: Array,
        total: Array,
        tail: Array,
        rate: float,
    ) -> None:
        """Take a step against the sum of gradients, added up in their order.

        Parameters
        ----------
        columns
            ``[count]`` of each gradient, one after another, increasing in each.
        bounds
            Where each gradient's begin in ``columns``, and the end.
        values
            ``[count + TAIL · gradients, width]``: each gradient and its tail.
        total
            ``[dimensions, width]`` zeros, which are zeros again afterwards.
        tail, rate
            As of `step`: the sum of the tails.
        """
        factor, threads = self._factor(tail), threads_for(_VISIT_NS * values.size)
        self._model.step_sum(
            *(columns, bounds, values, len(tail), total),
            *(factor, rate, self.sums, self._past, threads),
        )
        self._finish(tail[0] * factor, rate)

    @property
    def _past(self) -> float:
        """What a change counts in the sums for the average: all that was before it.

        AdaGrad's coordinates settle along a curve, whose average is one over the lengths of steps.
        """
        return self._model.now if self._adapts_and_settles else self.scales

    def _factor(self, tail: Array) -> float:
        weight = float(tail[1, 0])
        return 1 / weight if weight > 0 else 0.0

    def _finish(self, slope: Array, rate: float) -> None:
        """Step the intercepts, and count what the step's regularisation does to all coordinates."""
        if self.fits_intercept:
            if self.adaptive:
                self.intercept_squares += slope**2
                slope = slope / (np.sqrt(self.intercept_squares) + 1e-7)
            self.intercept -= rate * slope
            self.intercept_sums += self.intercept
        model = self._model
        if self.adaptive:
            model.now += rate
        else:
            model.now += rate * self.l1 / model.scale
            model.scale /= 1 + rate * self.l2
        self.steps += 1
        self.scales += model.scale
        if model.scale < _LEAST_SCALE:
            self.rows *= self.dtype.type(model.scale)
            model.now, self.scales = model.now * model.scale, self.scales / model.scale
            model.scale = 1.0

    def load(self, coordinates: Array, intercepts: Array) -> None:
        """Begin with a model: coordinates ``[dimensions, width]``, intercepts ``[width]``.

        AdaGrad takes them for coordinates that have had gradients of 1 so far.
        """
        self.rows[:, : self.width] = coordinates
        self.intercept[:] = intercepts
        if self.adaptive:
            self.rows[:, self.width : 2 * self.width] = np.asarray(coordinates) != 0

    def begin(self, mean: float, spread: float) -> None:
        """Learn what the targets of the rows to come are like.

        A new model's intercept begins at their mean. Their spread is the unit of AdaGrad's steps,
        whose lengths do not depend on the gradient's. A model that goes on keeps the largest.
        """
        self.spread = spread if self.steps == 0 else max(self.spread, spread)
        if self.fits_intercept and not (self.steps or self.intercept.any() or self.rows.any()):
            self.intercept[:] = mean

    def sized(self, dimensions: int) -> Self:
        """Return a new model of other dimensions, with the same settings."""
        return replace(self, dimensions=dimensions)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that such a model is made with."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def state(self) -> dict[str, Array]:
        """Return all that steps change: the arrays themselves, which the next step changes."""
        model = self._model
        counts = np.array([self.steps, self.scales, self.spread, model.scale, model.now])
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return {"counts": counts, **{k: array for k, array in arrays.items() if array is not None}}

    def by_column(self) -> dict[str, Array]:
        """Return the arrays that have a row for each coordinate."""
        return {name: array for name, array in self.state().items() if name in BY_COLUMN}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take over the state of a model with the same settings, bit by bit."""
        steps, self.scales, self.spread, *of_model = state["counts"].tolist()
        self.steps, (self._model.scale, self._model.now) = int(steps), of_model
        for name in state.keys() & set(_ARRAYS):
            getattr(self, name)[...] = state[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "state": self.state()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__init__(**pickled["settings"])  # type: ignore[misc]
        self.restore(pickled["state"])

    def read(self) -> tuple[Array, Array]:
        """Return the coordinates ``[dimensions, width]`` and the intercepts ``[width]``.

        They are copies, with all regularisation applied; the average over the steps if that was
        asked for.
        """
        out = np.empty((self.dimensions, self.width), self.dtype)
        if self.sums is None or self.steps == 0:
            self._model.read(out)
            return out, self.intercept.copy()
        for start in range(0, self.dimensions, _CHUNK):
            part = slice(start, start + _CHUNK)
            rows, sums = self._settled(self.rows[part], self.sums[part])
            np.multiply(rows[:, : self.width], self._past, out=out[part])
            out[part] -= sums
        out /= self._model.now if self._adapts_and_settles else self.steps
        return out, self.intercept_sums / self.steps

    def _settled(self, rows: Array, sums: Array) -> tuple[Array, Array]:
        """Return some rows and their sums as a step would find them that changes nothing more."""
        if not self._adapts_and_settles:
            return rows, sums
        rows, sums = rows.copy(), sums.copy()
        model = _cpu.LinearModel(rows, self.width, True, self.l1, self.l2)
        model.now = self._model.now
        rate = model.now / self.steps  # AdaGrad's steps all have one size
        model.step(None, np.ones_like(sums), 0.0, rate, sums, model.now, 1)
        return rows, sums


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

    def is_like(self, empty: Weights, dimensions: int) -> bool:
        """Tell whether it has these dimensions, and ``empty`` its shape, dtype and settings."""
        own = {**self.weights.settings, "dimensions": self.dimensions}
        return own == {**empty.settings, "dimensions": dimensions}

    def expanded(self) -> Weights:
        """Return the same with a coordinate for every column."""
        if self.columns is None:
            return self.weights
        weights, state = self.weights.sized(self.dimensions), self.weights.state()
        for name in self.weights.by_column():
            state[name] = spread(state[name], self.columns, self.dimensions)
        weights.restore(state)
        return weights


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros in memory of its own, of large pages where the system has them."""
    zeros = np.empty(shape, dtype)
    zeros.fill(0)
    return zeros
