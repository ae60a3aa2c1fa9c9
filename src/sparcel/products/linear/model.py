"""Linear models: their coordinates, wherever they were trained, and their files."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from sparcel.core._files import open_regular, replacing
from sparcel.errors import InputError, optional
from sparcel.products.linear.inputs import MOST_HELD, Classes, matrix_of
from sparcel.products.rows import Rows, check
from sparcel.products.rows.rows import Array


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


_BROKEN = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile)
"""What comes of a file that is something else; `zipfile` raises a RuntimeError where flags are."""


def write_arrays(
    path: Path, kind: str, about: Mapping[str, Any], arrays: Mapping[str, Array]
) -> None:
    """Write arrays, and ``about`` as JSON; the file is there completely or as it was before.

    Raises
    ------
    InputError
        When the file cannot be written, as on a full disk.
    """
    told = {"kind": kind, "arrays": list(arrays), **about}
    text = np.frombuffer(json.dumps(told).encode(), np.uint8)
    content: dict[str, Any] = {"about": text, **arrays}
    try:
        with replacing(path) as file:
            np.savez(file, **content)
    except OSError as error:
        raise InputError(f"{path} can't be written: {error.strerror}") from error


def read_arrays(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return what `write_arrays` wrote.

    Raises
    ------
    InputError
        When the file is not there, is broken, or holds something else.
    """
    try:
        with open_regular(path) as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(bytes(arrays.pop("about")))
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except _BROKEN as error:
        raise InputError(f"{path} is no {kind} of sparcel linear, or it is broken") from error
    if about.pop("kind", None) != kind:
        raise InputError(f"{path} is no {kind} of sparcel linear")
    # The checksums of a zip file are of contents, and not of names.
    if list(about.pop("arrays", arrays)) != list(arrays):
        raise InputError(f"{path} is broken: it has the arrays {', '.join(arrays)}")
    return about, arrays


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

    def evaluate(self, blocks: Iterable[Rows]) -> dict[str, float]:
        """Return the measures of labelled rows that the loss allows, by name.

        These are the number of rows, and of a classifier the accuracy, the log loss of the logistic
        loss, and with two classes the area under the ROC curve; of a regression, the root of the
        mean squared error and R².

        Raises
        ------
        InputError
            When there are no rows or no labels, or a label is none of the model's classes.
        """
        with optional("sparcel linear", "linear"):
            from sklearn import metrics
        margins, truths = [], []
        for rows in blocks:
            if rows.labels is None:
                raise InputError("these rows have no labels to compare with")
            margins.append(self.margins(rows))
            truths.append(rows.labels)
        if not margins:
            raise InputError("there are no rows to evaluate")
        found, truth = np.concatenate(margins), np.concatenate(truths)
        result = {"rows": float(len(truth))}
        if self.classes is None:
            error = found[:, 0] - truth.astype(np.float64)
            result["rmse"] = float(np.sqrt((error**2).mean()))
            result["r2"] = float(metrics.r2_score(truth.astype(np.float64), found[:, 0]))
            return result
        if truth.dtype.kind == "U" and self.classes.dtype.kind != "U":
            truth = _numbers(truth, self.classes.dtype)
        numbers = Classes(self.classes).numbers(truth)
        result["accuracy"] = float((self.predict(found) == truth).mean())
        if self.loss == "logistic":
            shares = self.probabilities(found)
            result["log_loss"] = float(
                -np.log(np.maximum(shares[np.arange(len(truth)), numbers], 1e-300)).mean()
            )
        if len(self.classes) == 2 and len(np.unique(numbers)) == 2:
            result["roc_auc"] = float(metrics.roc_auc_score(numbers, found[:, 0]))
        return result

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
        write_arrays(path, "model", about, arrays)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises
        ------
        InputError
            When the file holds no model.
        """
        about, arrays = read_arrays(path, "model")
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


def _numbers(labels: Array, dtype: np.dtype[Any]) -> Array:
    """Return labels that are written as texts, as those of TSV files are, as numbers."""
    try:
        return labels.astype(dtype)
    except (ValueError, OverflowError) as error:
        raise InputError(f"the model's labels are numbers, and these are not: {error}") from None


def labels(margins: Array, classes: Array) -> Array:
    """Return the label of each row, given its margins ``[rows, width]``."""
    if margins.shape[1] > 1:
        return np.asarray(classes[margins.argmax(axis=1)])
    return np.asarray(classes[(margins[:, 0] > 0).astype(int)])


def probabilities(margins: Array) -> Array:
    """Return the probability of each class, ``[rows, classes]``, under the logistic loss.

    With more than two classes, these are the probabilities of each against the rest, scaled so that
    they add up to 1.
    """
    logs = -np.logaddexp(0, -margins.astype(np.float64))
    if margins.shape[1] == 1:
        logs = np.hstack([-np.logaddexp(0, margins.astype(np.float64)), logs])
        return np.asarray(np.exp(logs))
    # Less the largest, so that they add up to 1 also where all are too small for a float.
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))
