"""What a step of a linear model is, in plain numpy on dense rows; and rows to step on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparcel.products.rows import Rows
from sparcel.products.rows.rows import Array


def rows_of(dense: Array, labels: Array | None = None) -> Rows:
    """Return the nonzero entries of a matrix, row by row."""
    where = [np.flatnonzero(row) for row in dense]
    offsets = np.cumsum([0, *map(len, where)]).astype(np.int64)
    columns = np.concatenate([*where, np.empty(0)]).astype(np.int32)
    values = np.concatenate([row[found] for row, found in zip(dense, where, strict=True)] or [[]])
    return Rows(offsets, columns, values.astype(dense.dtype), dense.shape[1], labels)


def random_rows(seed: int, rows: int, dimensions: int, dtype: Any = np.float32) -> Array:
    """Return small whole numbers, most of them zero; common columns come first."""
    random = np.random.default_rng(seed)
    share = 0.6 / (1 + np.arange(dimensions) / 4)
    entries = random.integers(1, 4, (rows, dimensions)) * random.choice([-1, 1], (rows, dimensions))
    return np.where(random.random((rows, dimensions)) < share, entries, 0).astype(dtype)


def loss_at(name: str, margin: Array, target: Array) -> tuple[Array, Array]:
    """Return the loss and its derivative by the margin."""
    if name == "squared":
        return (margin - target) ** 2 / 2, margin - target
    agreement = margin * target
    if name == "logistic":
        return np.logaddexp(0, -agreement), -target / (1 + np.exp(agreement))
    lacking = np.maximum(1 - agreement, 0)
    if name == "hinge":
        return lacking, -target * (lacking > 0)
    return lacking**2, -2 * target * lacking


@dataclass
class DenseModel:
    """A model whose steps change all coordinates at once."""

    loss: str
    l1: float
    l2: float
    adaptive: bool
    weights: Array
    intercept: float = 0.0
    squares: Any = 0.0
    intercept_squares: float = 0.0
    seen: list[Array] = field(default_factory=list)

    def gradient(
        self, rows: Array, targets: Array, row_weights: Array
    ) -> tuple[Array, float, float]:
        margins = rows @ self.weights + self.intercept
        losses, slopes = loss_at(self.loss, margins, targets)
        slopes = slopes * row_weights
        return rows.T @ slopes, float(slopes.sum()), float((losses * row_weights).sum())

    def step(self, gradient: Array, slope: float, rate: float) -> None:
        """Take a step against a mean gradient, then one of the regularisation."""
        roots, intercept_root = np.ones(len(self.weights)), 1.0
        if self.adaptive:
            self.squares = self.squares + gradient**2
            self.intercept_squares += slope**2
            roots = np.sqrt(self.squares) + 1e-7
            intercept_root = self.intercept_squares**0.5 + 1e-7
        self.weights = self.weights - rate * gradient / roots
        lengths = rate / roots
        lower = np.maximum(np.abs(self.weights) - lengths * self.l1, 0)
        self.weights = np.copysign(lower, self.weights) / (1 + lengths * self.l2)
        self.intercept -= rate * slope / intercept_root
        self.seen.append(np.append(self.weights, self.intercept))
