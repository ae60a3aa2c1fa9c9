"""A fitted linear model, as it is saved, loaded and used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from sparcel.errors import InputError
from sparcel.linear import checkpoint
from sparcel.linear.classes import labels, probabilities
from sparcel.linear.matrices import matrix_of
from sparcel.linear.sgd.weights import MOST_HELD
from sparcel.rows import Rows, check
from sparcel.rows.rows import Array


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Coordinates and intercepts, and what they were fitted to.

    Attributes
    ----------
    coefficients
        ``[count, width]`` of all columns, or of some; width 1 for two classes and for regression.
    intercepts
        ``[width]``.
    loss
        What was minimised.
    classes
        ``[classes]`` labels, sorted; None for regression.
    about
        What else to know, such as how rows were made of text; anything that JSON holds.
    columns
        ``[count]``, increasing, where coefficients are those of some columns and all others are
        zero; None for all columns.
    wide
        Number of columns of the data, where ``columns`` are given.
    """

    coefficients: Array
    intercepts: Array
    loss: str
    classes: Array | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    columns: Array | None = None
    wide: int = 0

    @property
    def dimensions(self) -> int:
        """Number of columns of the data."""
        return len(self.coefficients) if self.columns is None else self.wide

    def margins(self, rows: Rows) -> Array:
        """Return the margins of rows, ``[rows, width]``.

        Raises
        ------
        InputError
            When the rows have more dimensions than the model.
        """
        if rows.dimensions > self.dimensions:
            raise InputError(
                f"these rows have {rows.dimensions} dimensions, the model {self.dimensions};"
                f" fit it with --dimensions {rows.dimensions}, or make these rows as its own"
            )
        check(rows)
        if self.columns is not None:
            rows = rows.among(self.columns)
        matrix = matrix_of(replace(rows, dimensions=len(self.coefficients)))
        return np.asarray(matrix @ self.coefficients + self.intercepts)

    def predict(self, margins: Array) -> Array:
        """Return labels, or numbers in a regression, for margins."""
        return margins[:, 0] if self.classes is None else labels(margins, self.classes)

    def probabilities(self, margins: Array) -> Array:
        """Return the probability of each class, ``[rows, classes]``.

        Raises
        ------
        InputError
            When the loss was not the logistic one.
        """
        if self.loss != "logistic":
            raise InputError(f"a model of the {self.loss} loss has no probabilities")
        return probabilities(margins)

    def save(self, path: Path) -> None:
        """Write an ``.npz`` file, without the coordinates that are zero if that is shorter."""
        places = np.flatnonzero(self.coefficients.any(axis=1))
        rows = places if self.columns is None else self.columns[places]
        arrays = {"intercepts": self.intercepts}
        each = self.coefficients[:1].nbytes
        if len(rows) * (8 + each) < self.dimensions * each or self.dimensions > MOST_HELD:
            arrays |= {"rows": rows, "values": self.coefficients[places]}
        else:
            arrays["coefficients"] = _spread(rows, self.coefficients[places], self.dimensions)
        about = {
            "loss": self.loss,
            "dimensions": self.dimensions,
            "about": self.about,
            "classes": None if self.classes is None else self.classes.tolist(),
        }
        checkpoint.write(path, "model", about, arrays)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises
        ------
        InputError
            When the file holds no model.
        """
        about, arrays = checkpoint.read(path, "model")
        columns, dimensions = None, about["dimensions"]
        if "coefficients" in arrays:
            coefficients = arrays["coefficients"]
        elif dimensions > MOST_HELD:
            columns, coefficients = arrays["rows"], arrays["values"]
        else:
            coefficients = _spread(arrays["rows"], arrays["values"], dimensions)
        classes = None if about["classes"] is None else np.array(about["classes"])
        return cls(
            *(coefficients, arrays["intercepts"], about["loss"], classes, about["about"]),
            *(columns, dimensions),
        )


def _spread(rows: Array, values: Array, dimensions: int) -> Array:
    whole = np.zeros((dimensions, values.shape[1]), values.dtype)
    whole[rows] = values
    return whole
