"""How well a model does on labelled rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sparcel.errors import InputError, optional
from sparcel.linear.classes import Classes
from sparcel.linear.model import LinearModel
from sparcel.rows import Rows
from sparcel.rows.rows import Array


def evaluate(model: LinearModel, blocks: Iterable[Rows]) -> dict[str, float]:
    """Return the measures that the model's loss allows, by name.

    These are the number of rows, and of a classifier the accuracy, the log loss of the logistic
    loss, and with two classes the area under the ROC curve; of a regression, the root of the mean
    squared error and R².

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
        margins.append(model.margins(rows))
        truths.append(rows.labels)
    if not margins:
        raise InputError("there are no rows to evaluate")
    found, truth = np.concatenate(margins), np.concatenate(truths)
    result = {"rows": float(len(truth))}
    if model.classes is None:
        error = found[:, 0] - truth.astype(np.float64)
        result["rmse"] = float(np.sqrt((error**2).mean()))
        result["r2"] = float(metrics.r2_score(truth.astype(np.float64), found[:, 0]))
        return result
    if truth.dtype.kind == "U" and model.classes.dtype.kind != "U":
        truth = _numbers(truth, model.classes.dtype)
    numbers = Classes(model.classes).numbers(truth)
    result["accuracy"] = float((model.predict(found) == truth).mean())
    if model.loss == "logistic":
        shares = model.probabilities(found)
        result["log_loss"] = float(
            -np.log(np.maximum(shares[np.arange(len(truth)), numbers], 1e-300)).mean()
        )
    if len(model.classes) == 2 and len(np.unique(numbers)) == 2:
        result["roc_auc"] = float(metrics.roc_auc_score(numbers, found[:, 0]))
    return result


def _numbers(labels: Array, dtype: np.dtype[Any]) -> Array:
    """Return labels that are written as texts, as those of TSV files are, as numbers."""
    try:
        return labels.astype(dtype)
    except (ValueError, OverflowError) as error:
        raise InputError(f"the model's labels are numbers, and these are not: {error}") from None
