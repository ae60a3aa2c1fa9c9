"""Labels of classes, and the numbers that stand for them in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sparcel.core._checks import checked_number
from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from sparcel.products.linear.ranks import gathered, run_or_fail_everywhere
from sparcel.products.rows.rows import Array


@dataclass(frozen=True, eq=False)
class Classes:
    """The classes of a training.

    Attributes
    ----------
    labels
        ``[classes]``, sorted: numbers or strings.
    """

    labels: Array

    @classmethod
    def of(cls, y: Array, comm: Communicator | None = None) -> Self:
        """Return the classes that occur on any rank; all ranks call.

        Raises
        ------
        InputError
            On all ranks, when there are fewer than two.
        """
        own = np.unique(y)
        if comm is not None:
            parts = gathered(comm, [own.dtype.kind, own.tolist()], "classes")
            if len({kind for kind, labels in parts if labels}) > 1:
                raise InputError(
                    "ranks have labels of different kinds, such as numbers and strings; give all"
                    " the same"
                )
            own = np.unique(np.array([label for _, labels in parts for label in labels]))
        if len(own) == 0:
            raise InputError("there are no rows to fit a model to, on any rank")
        if len(own) < 2:
            raise InputError(
                f"a classifier needs labels of at least two classes, got {own.tolist()}: 1 class"
            )
        return cls(own)

    @property
    def width(self) -> int:
        """Number of classes that are told from the rest: one, where there are two classes."""
        return 1 if len(self.labels) == 2 else len(self.labels)

    def numbers(self, y: Array) -> Array:
        """Return the place of each label among the classes.

        Raises
        ------
        InputError
            When a label is none of the classes.
        """
        places = np.searchsorted(self.labels, y)
        places[places == len(self.labels)] = 0
        wrong = self.labels[places] != y
        if wrong.any():
            raise InputError(
                f"label {y[wrong].tolist()[0]!r} is none of the classes {self.labels.tolist()} that"
                " the model knows; the first rows, or classes=, must name all"
            )
        return places

    def targets(self, numbers: Array, dtype: Any) -> Array:
        """Return what the kernels fit to: 1 and -1, or the numbers of classes."""
        return (2 * numbers - 1 if self.width == 1 else numbers).astype(dtype)

    def row_weights(
        self,
        numbers: Array,
        class_weight: Mapping[Any, float] | str | None,
        weights: Array | None,
        dtype: Any,
        comm: Communicator | None = None,
    ) -> Array | None:
        """Return each row's weight times that of its class; None where all are 1.

        All ranks call, because ``"balanced"`` counts the rows of all of them.

        Raises
        ------
        InputError
            On all ranks, when a class has another weight than a finite number of at least 0, there
            is no such class, or ranks have other weights.
        """
        given = run_or_fail_everywhere(comm, lambda: self._checked_weights(class_weight, dtype))
        if any(other != given for other in gathered(comm, given, "class_weight")):
            raise InputError("ranks must have the same class_weight; give all the same")
        if given is None:
            return weights
        own = np.ones(len(numbers), dtype) if weights is None else weights
        if isinstance(given, str):  # balanced
            counts = np.bincount(numbers, own, len(self.labels)).tolist()
            total = np.sum(gathered(comm, counts, "weights of classes"), axis=0)
            share = total.sum() / len(self.labels)
            given = np.divide(share, total, out=np.zeros(len(total)), where=total > 0).tolist()
        return np.asarray(own * np.array(given)[numbers], dtype)

    def _checked_weights(
        self, class_weight: Mapping[Any, float] | str | None, dtype: Any
    ) -> list[float] | str | None:
        """Return the weight of each class; None and "balanced" stay what they are."""
        if class_weight is None or (isinstance(class_weight, str) and class_weight == "balanced"):
            return class_weight
        if not isinstance(class_weight, Mapping):
            raise InputError(
                "class_weight must be None, 'balanced' or a dict of weights by label, got"
                f" {class_weight!r}"
            )
        known = self.labels.tolist()
        if unknown := class_weight.keys() - set(known):
            raise InputError(
                f"class_weight has {unknown.pop()!r}, which is none of the classes {known}"
            )
        most = float(np.finfo(dtype).max)
        each = {
            label: checked_number(weight, f"class_weight[{label!r}]", at_least=0, at_most=most)
            for label, weight in class_weight.items()
        }
        return [each.get(label, 1.0) for label in known]


def finite_numbers(labels: Array, dtype: Any) -> Array:
    """Return the labels of a regression as finite numbers.

    Raises
    ------
    InputError
        When one is no number, or too large for the dtype.
    """
    try:
        with np.errstate(over="ignore"):  # what is infinite is refused
            found = np.ascontiguousarray(labels, dtype)
    except ValueError as error:
        raise InputError(f"regression needs labels that are numbers: {error}") from None
    if not np.isfinite(found).all():
        wrong = labels[~np.isfinite(found)][0]
        raise InputError(f"regression needs labels that are finite in {found.dtype}, got {wrong!s}")
    return found


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
