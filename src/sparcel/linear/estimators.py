"""Linear models with the interface of scikit-learn, fitted by all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import numpy as np

from sparcel.comm import Group
from sparcel.errors import InputError, optional
from sparcel.linear.base import LinearBase, takes_steps
from sparcel.linear.classes import Classes, finite_numbers, labels, probabilities
from sparcel.linear.inputs import sample_weights
from sparcel.linear.parameters import Parameters
from sparcel.linear.ranks import ranks_of, run_or_fail_everywhere
from sparcel.rows.rows import Array

with optional("sparcel.linear", "linear"):
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets

E = TypeVar("E")


def _documented(estimator: type[E]) -> type[E]:
    """Add what an estimator inherits to its docstring."""
    bases = (Parameters, LinearBase, _Classifier)
    inherited = [base.__doc__ or "" for base in bases if issubclass(estimator, base)]
    bodies = ["\n" + text.partition("\n")[2] for text in inherited]
    estimator.__doc__ = (estimator.__doc__ or "") + "".join(bodies)
    return estimator


@dataclass(kw_only=True, eq=False, repr=False)
class _Classifier(ClassifierMixin, LinearBase):  # type: ignore[misc]
    """A linear classifier; with more than two classes, each is told from all others.

    Parameters
    ----------
    class_weight
        The weight of each class's rows by label, finite and not negative, 1 where none is given;
        ``"balanced"`` gives all classes the same weight in all.

    Attributes
    ----------
    classes_
        ``[classes]`` the labels, sorted.
    """

    class_weight: Mapping[Any, float] | str | None = None

    def _loss(self) -> str:
        raise NotImplementedError

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, group: Group = None) -> Self:
        """Fit the model to the rows of all ranks.

        Parameters
        ----------
        X
            This rank's rows: an array ``[rows, features]``, a sparse matrix, or `Rows`. Or the
            path of an SVMlight file, of which each rank reads its own part.
        y
            ``[rows]`` labels, numbers or strings; None where ``X`` brings them.
        sample_weight
            ``[rows]``, finite and not negative; or one number for all.
        group
            The ranks that fit the model together, as for `sparcel.all_reduce`; all of them call.
            Without it, these are the ranks that this process was launched with.
        """
        return self._fit(X, y, sample_weight, group, once=False)

    @available_if(takes_steps)  # type: ignore[untyped-decorator]
    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        classes: Sequence[Any] | None = None,
        sample_weight: Any = None,
        group: Group = None,
    ) -> Self:
        """Pass once over more rows, from where the model is; otherwise as `fit`.

        Parameters
        ----------
        classes
            All labels that will ever come. The first call needs it, unless all occur in ``y``; a
            later one may leave it out.
        """
        return self._fit(X, y, sample_weight, group, once=True, classes=classes)

    def _fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        group: Group,
        once: bool,
        classes: Sequence[Any] | None = None,
    ) -> Self:
        fresh = not (once and hasattr(self, "coef_"))
        comm = ranks_of(group)
        X, y = self._checked(X, y, comm, fresh)
        run_or_fail_everywhere(comm, lambda: check_classification_targets(y))
        if fresh:
            self.classes_ = Classes.of(y if classes is None else np.asarray(classes), comm).labels
        elif classes is not None:
            run_or_fail_everywhere(comm, lambda: _check_same(classes, self.classes_))
        classes_known = Classes(self.classes_)
        numbers = run_or_fail_everywhere(comm, lambda: classes_known.numbers(y))
        given = run_or_fail_everywhere(comm, lambda: sample_weights(sample_weight, len(y), X.dtype))
        row_weights = classes_known.row_weights(numbers, self.class_weight, given, X.dtype, comm)
        targets = classes_known.targets(numbers, X.dtype)
        self._train(X, targets, row_weights, classes_known.width, self._loss(), comm, once)
        return self

    def decision_function(self, X: Any) -> Array:
        """Return the margins, ``[rows]`` for two classes, otherwise ``[rows, classes]``."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """Return the label of each row, ``[rows]``."""
        return labels(self._scores(X), self.classes_)


def _check_same(given: Sequence[Any], known: Array) -> None:
    """Raise an `InputError` unless these are the classes that the model knows."""
    if set(np.asarray(given).tolist()) != set(known.tolist()):
        raise InputError(
            f"classes must be those of the first call, {known.tolist()}, got"
            f" {np.unique(given).tolist()}; leave them out, or begin with all"
        )


@_documented
@dataclass(kw_only=True, eq=False, repr=False)
class SparseLogisticRegression(_Classifier):
    """Logistic regression on sparse rows, by SGD or SCD on one rank or many."""

    def _loss(self) -> str:
        return "logistic"

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, ``[rows, classes]``.

        With more than two classes, these are the probabilities of each against the rest, scaled so
        that they add up to 1.
        """
        return probabilities(self._scores(X))

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithms of `predict_proba`."""
        return np.asarray(np.log(self.predict_proba(X)))


@_documented
@dataclass(kw_only=True, eq=False, repr=False)
class SparseLinearSVC(_Classifier):
    """A linear support vector machine on sparse rows, by SGD or SCD on one rank or many.

    Parameters
    ----------
    loss
        ``"hinge"`` or ``"squared_hinge"``.
    """

    loss: Literal["hinge", "squared_hinge"] = "hinge"

    def _loss(self) -> str:
        return self.loss


@_documented
@dataclass(kw_only=True, eq=False, repr=False)
class SparseLinearRegression(RegressorMixin, LinearBase):  # type: ignore[misc]
    """Least squares on sparse rows, by SGD or SCD: ridge regression, Lasso or elastic net."""

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, group: Group = None) -> Self:
        """Fit the model to the rows of all ranks; ``y`` holds numbers, ``[rows]``.

        Otherwise as `SparseLogisticRegression.fit`.
        """
        return self._fit(X, y, sample_weight, group, once=False)

    @available_if(takes_steps)  # type: ignore[untyped-decorator]
    def partial_fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, group: Group = None
    ) -> Self:
        """Pass once over more rows, from where the model is; otherwise as `fit`."""
        return self._fit(X, y, sample_weight, group, once=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any, group: Group, once: bool) -> Self:
        fresh = not (once and hasattr(self, "coef_"))
        comm = ranks_of(group)
        X, y = self._checked(X, y, comm, fresh, y_numeric=True)
        row_weights = run_or_fail_everywhere(
            comm, lambda: sample_weights(sample_weight, len(y), X.dtype)
        )
        targets = run_or_fail_everywhere(comm, lambda: finite_numbers(y, X.dtype))
        self._train(X, targets, row_weights, 1, "squared", comm, once)
        self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])
        return self

    def predict(self, X: Any) -> Array:
        """Return the value of each row, ``[rows]``."""
        scores = self._scores(X)
        return scores[:, 0] if scores.ndim == 2 else scores
