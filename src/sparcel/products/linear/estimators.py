"""Linear models with the interface of scikit-learn, fitted by all ranks together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeVar

import numpy as np

from sparcel.core._checks import checked_flag
from sparcel.core.comm import Communicator, Group
from sparcel.errors import InputError, checked_name, optional
from sparcel.products.linear.coordinate_descent import Scd
from sparcel.products.linear.gradient_descent import new_weights, prepare
from sparcel.products.linear.inputs import (
    MOST_HELD,
    Classes,
    as_matrix,
    as_rows,
    finite_numbers,
    opened,
    product,
    sample_weights,
)
from sparcel.products.linear.model import Coordinates, labels, probabilities
from sparcel.products.linear.parameters import SOLVERS, Parameters
from sparcel.products.linear.ranks import ranks_of, run_or_fail_everywhere
from sparcel.products.linear.trainer import Epoch, Examples, Settings, Trainer
from sparcel.products.linear.weights import WholeModel
from sparcel.products.rows.rows import Array

with optional("sparcel.linear", "linear"):
    import scipy.sparse as sp
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

E = TypeVar("E")

_FLOATS = [np.float32, np.float64]


def takes_steps(estimator: _Linear) -> bool:
    """Tell whether an estimator can go on with other rows; raise why not."""
    if checked_name(estimator.solver, SOLVERS, "solver") == "scd":
        raise InputError(
            "partial_fit takes steps of stochastic gradient descent, and solver='scd' needs all"
            " rows in each step; call fit, or take solver='sgd'"
        )
    if estimator.density is not None:
        raise InputError(
            f"partial_fit forgets what density={estimator.density} has kept back when it ends;"
            " call fit, or leave out density"
        )
    return True


def _warn_of_poor_fit(trainer: Trainer, settings: Settings) -> None:
    if trainer.is_worse_than_none:
        message = (
            "the model is worse than the mean of the targets: scale the columns, so that they are"
            " of like size, lower eta0, or take solver='scd'"
        )
    elif trainer.still_falls:
        other = ", or try another eta0 or solver='scd'" if settings.solver == "sgd" else ""
        message = (
            f"the loss was still falling after {settings.epochs} epochs by more than"
            f" tol={settings.tol} allows: take more epochs{other}"
        )
    else:
        return
    warnings.warn(message, ConvergenceWarning, stacklevel=4)


def _documented(estimator: type[E]) -> type[E]:
    """Add what an estimator inherits to its docstring."""
    bases = (Parameters, _Linear, _Classifier)
    inherited = [base.__doc__ or "" for base in bases if issubclass(estimator, base)]
    bodies = ["\n" + text.partition("\n")[2] for text in inherited]
    estimator.__doc__ = (estimator.__doc__ or "") + "".join(bodies)
    return estimator


@dataclass(kw_only=True, eq=False, repr=False)
class _Linear(Parameters, BaseEstimator):  # type: ignore[misc]
    """What the estimators share: their parameters, and a training on all ranks.

    Parameters
    ----------
    warm_start
        Whether `fit` begins with the model that it finds, and not anew.

    Attributes
    ----------
    coef_
        ``[classes, features]``, one row for two classes; for regression ``[features]``. A sparse
        matrix for more than 2³¹ − 1 features.
    intercept_
        ``[classes]``, or one number.
    epochs_
        What each epoch was like, a list of `Epoch`.
    n_iter_
        How many epochs the model was trained for.
    """

    warm_start: bool = False
    coef_: Any = field(init=False)
    intercept_: Any = field(init=False)

    def _loss(self) -> str:
        raise NotImplementedError

    def _checked_labels(self, y: Array, dtype: Any) -> Array:
        """Return this rank's labels, or raise what is wrong with them."""
        raise NotImplementedError

    def _examples(
        self, given: Examples, classes: Sequence[Any] | None, fresh: bool, comm: Communicator | None
    ) -> Examples:
        """Return examples for training, made of some whose targets are labels; all ranks call."""
        return given

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, group: Group = None) -> Self:
        """Fit the model to the rows of all ranks; with ``warm_start``, from where it is.

        Parameters
        ----------
        X
            This rank's rows: an array ``[rows, features]``, a sparse matrix, or `Rows`. Or the
            path of an SVMlight file, of which each rank reads its own part.
        y
            ``[rows]`` labels, numbers or strings, for regression numbers; None where ``X`` brings
            them.
        sample_weight
            ``[rows]``, finite and not negative; or one number for all.
        group
            The ranks that fit the model together, as for `sparcel.all_reduce`; all of them call.
            Without it, these are the ranks that this process was launched with.
        """
        return self._fit(X, y, sample_weight, group, once=False)

    def _fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        group: Group,
        once: bool,
        classes: Sequence[Any] | None = None,
    ) -> Self:
        """Fit a new model, or pass ``once`` over more rows; all ranks call."""
        checked_flag(self.warm_start, "warm_start")
        comm, fresh = ranks_of(group), not ((once or self.warm_start) and hasattr(self, "coef_"))
        X = opened(X, comm, None if fresh else self.n_features_in_)

        def own() -> tuple[Settings, Examples]:
            matrix, found = self._validated(*as_matrix(X, y), fresh, comm is not None)
            weights = sample_weights(sample_weight, len(found), matrix.dtype)
            found = self._checked_labels(found, matrix.dtype)
            chosen = {one.name: getattr(self, one.name) for one in fields(Parameters)}
            settings = Settings(loss=self._loss(), **chosen)
            return settings, Examples(as_rows(matrix), found, weights)

        settings, given = run_or_fail_everywhere(comm, own)
        examples = self._examples(given, classes, fresh, comm)
        epochs: list[Epoch] = []
        trainer = self._trainer(settings, examples, comm, once, fresh)
        if once:
            trainer.epochs = getattr(self, "n_iter_", 0)
            epochs.append(trainer.epoch())
        else:
            trainer.train(epochs.append)
            trainer.forget_rows()
            _warn_of_poor_fit(trainer, settings)
        self._keep(*trainer.fitted())
        self.epochs_, self.n_iter_ = epochs, trainer.epochs
        return self

    def _validated(self, X: Any, y: Any, fresh: bool, may_be_empty: bool) -> tuple[Any, Array]:
        """Return rows and labels as arrays, or raise what is wrong with them on this rank."""
        kept: WholeModel | None = None if fresh else getattr(self, "_whole", None)
        checked: tuple[Any, Array] = validate_data(
            *(self, X, y),
            accept_sparse="csr",
            dtype=_FLOATS if kept is None else kept.weights.dtype,
            ensure_min_samples=0 if may_be_empty else 1,
            reset=fresh,
            y_numeric=isinstance(self, RegressorMixin),
        )
        return checked

    def _trainer(
        self,
        settings: Settings,
        examples: Examples,
        comm: Communicator | None,
        once: bool,
        fresh: bool,
    ) -> Trainer:
        """Return what trains: a new model if ``fresh``, or on from where training last ended."""
        width, rows = examples.width, examples.rows
        if settings.solver == "scd":
            scd = Scd(examples, settings, comm)
            if not fresh:
                scd.begin(*self._model(width))
            return scd
        if fresh and not once:
            return prepare(examples, settings, comm)
        empty = new_weights(settings, width, rows.values.dtype)
        kept: WholeModel | None = getattr(self, "_whole", None)
        if kept is not None and kept.is_like(empty, rows.dimensions):
            return prepare(examples, settings, comm, kept.expanded())
        weights = empty.sized(rows.dimensions)
        if not fresh:
            weights.load(*self._model(width))
        return prepare(examples, settings, comm, weights)

    def _model(self, width: int) -> tuple[Array, Array]:
        """Return the coordinates ``[dimensions, width]`` and the intercepts ``[width]``."""
        self.densify()
        return np.reshape(self.coef_, (width, -1)).T, np.ravel(self.intercept_)

    def _keep(self, fitted: Coordinates, whole: WholeModel | None) -> None:
        """Take over a model that is trained, and what a pass over more rows goes on from."""
        fitted.check()
        self._whole = whole
        coefficients = fitted.sparse() if fitted.dimensions > MOST_HELD else fitted.dense().T
        self.coef_, self.intercept_ = coefficients, fitted.intercepts.astype(coefficients.dtype)
        if isinstance(self, RegressorMixin):
            self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])

    def _scores(self, X: Any) -> Array:
        check_is_fitted(self, "coef_")
        X, _ = as_matrix(opened(X, None, self.n_features_in_))
        X = validate_data(self, X, accept_sparse="csr", dtype=_FLOATS, reset=False)
        scores: Array = product(X, self.coef_) + self.intercept_
        return scores

    def sparsify(self) -> Self:
        """Make ``coef_`` a sparse matrix, which is smaller where most coordinates are zero."""
        check_is_fitted(self, "coef_")
        self.coef_ = sp.csr_matrix(self.coef_)
        return self

    def densify(self) -> Self:
        """Make ``coef_`` an array again."""
        check_is_fitted(self, "coef_")
        if sp.issparse(self.coef_):
            if self.coef_.shape[1] > MOST_HELD:
                raise InputError(
                    f"coef_ has {self.coef_.shape[1]} columns, and an array takes up to"
                    f" {MOST_HELD}: leave it sparse"
                )
            dense = self.coef_.toarray()
            self.coef_ = dense[0] if isinstance(self, RegressorMixin) else dense
        return self


@dataclass(kw_only=True, eq=False, repr=False)
class _Classifier(ClassifierMixin, _Linear):  # type: ignore[misc]
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

    def _checked_labels(self, y: Array, dtype: Any) -> Array:
        check_classification_targets(y)
        return y

    def _examples(
        self, given: Examples, classes: Sequence[Any] | None, fresh: bool, comm: Communicator | None
    ) -> Examples:
        y, dtype = given.targets, given.rows.values.dtype
        if fresh:
            self.classes_ = Classes.of(y if classes is None else np.asarray(classes), comm).labels
            classes = None
        found = Classes(self.classes_)

        def own() -> Array:
            if classes is not None:
                found.check_same(classes)
            return found.numbers(y)

        numbers = run_or_fail_everywhere(comm, own)
        weights = found.row_weights(numbers, self.class_weight, given.weights, dtype, comm)
        targets = found.targets(numbers, dtype)
        return replace(given, targets=targets, weights=weights, width=found.width)

    def decision_function(self, X: Any) -> Array:
        """Return the margins, ``[rows]`` for two classes, otherwise ``[rows, classes]``."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """Return the label of each row, ``[rows]``."""
        return labels(self._scores(X), self.classes_)


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
class SparseLinearRegression(RegressorMixin, _Linear):  # type: ignore[misc]
    """Least squares on sparse rows, by SGD or SCD: ridge regression, Lasso or elastic net."""

    def _loss(self) -> str:
        return "squared"

    @available_if(takes_steps)  # type: ignore[untyped-decorator]
    def partial_fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, group: Group = None
    ) -> Self:
        """Pass once over more rows, from where the model is; otherwise as `fit`."""
        return self._fit(X, y, sample_weight, group, once=True)

    def _checked_labels(self, y: Array, dtype: Any) -> Array:
        return finite_numbers(y, dtype)

    def predict(self, X: Any) -> Array:
        """Return the value of each row, ``[rows]``."""
        scores = self._scores(X)
        return scores[:, 0] if scores.ndim == 2 else scores
