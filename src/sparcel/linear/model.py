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
from sparcel.linear.coordinates import Coordinates, spread
from sparcel.linear.matrices import matrix_of
from sparcel.linear.sgd.weights import MOST_HELD
from sparcel.rows import Rows, check
from sparcel.rows.rows import Array


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A model, and what it was fitted to.

    Attributes
    ----------
    coordinates
        Of some columns, or of all.
    loss
        What was minimised.
    classes
        ``[classes]`` labels, sorted; None for regression.
    about
        What else to know, such as how rows were made of text; anything that JSON holds.
    """

    coordinates: Coordinates
    loss: str
    classes: Array | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def margins(self, rows: Rows) -> Array:
        """Return the margins of rows, ``[rows, width]``.

        Raises
        ------
        InputError
            When the rows have more dimensions than the model.
        """
        model = self.coordinates
        if rows.dimensions > model.dimensions:
            raise InputError(
                f"these rows have {rows.dimensions} dimensions, the model {model.dimensions};"
                f" fit it with --dimensions {rows.dimensions}, or make these rows as its own"
            )
        check(rows)
        if model.columns is not None:
            rows = rows.among(model.columns)
        matrix = matrix_of(replace(rows, dimensions=len(model.values)))
        return np.asarray(matrix @ model.values + model.intercepts)

    def predict(self, margins: Array) -> Array:
        """Return labels, or numbers in a regression, for margins."""
        return margins[:, 0] if self.classes is None else labels(margins, self.classes)

    def probabilities(self, margins: Array) -> Array:
        """Return the probability of each class, ``[rows, classes]``, of the logistic loss."""
        self.check_probabilities()
        return probabilities(margins)

    def check_probabilities(self) -> None:
        """Raise an `InputError` when the loss was not the logistic one."""
        if self.loss != "logistic":
            raise InputError(f"a model of the {self.loss} loss has no probabilities")

    def save(self, path: Path) -> None:
        """Write an ``.npz`` file, without the coordinates that are zero if that is shorter."""
        model = self.coordinates
        places = np.flatnonzero(model.values.any(axis=1))
        rows = places if model.columns is None else model.columns[places]
        values, each = model.values[places], model.values[:1].nbytes
        arrays = {"intercepts": model.intercepts}
        if len(rows) * (8 + each) < model.dimensions * each or model.dimensions > MOST_HELD:
            arrays |= {"rows": rows, "values": values}
        else:
            arrays["coefficients"] = spread(values, rows, model.dimensions)
        about = {
            "loss": self.loss,
            "dimensions": model.dimensions,
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
            values = arrays["coefficients"]
        elif dimensions > MOST_HELD:
            columns, values = arrays["rows"], arrays["values"]
        else:
            values = spread(arrays["values"], arrays["rows"], dimensions)
        classes = None if about["classes"] is None else np.array(about["classes"])
        coordinates = Coordinates(columns, values, arrays["intercepts"], dimensions)
        return cls(coordinates, about["loss"], classes, about["about"])
