"""Linear models with the interface of scikit-learn, fitted by all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, TypeVar

import numpy as np

from sparcel.comm import Communicator, Group
from sparcel.errors import InputError, known, optional
from sparcel.linear.classes import Classes, labels, probabilities
from sparcel.linear.inputs import as_matrix, as_rows, sample_weights
from sparcel.linear.ranks import ranks_of, together
from sparcel.linear.scd import Scd
from sparcel.linear.sgd import Epoch, Sgd
from sparcel.linear.step_sizes import Rule
from sparcel.linear.training import Settings, prepare, train
from sparcel.linear.weights import Weights
from sparcel.rows import Rows
from sparcel.rows.rows import Array

with optional("sparcel.linear", "linear"):
    import scipy.sparse as sp
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

_FLOATS = [np.float32, np.float64]
_SOLVERS = ("sgd", "scd")

E = TypeVar("E")


def _takes_steps(estimator: _Linear) -> bool:
    """Tell whether an estimator can go on with other rows; raise why not."""
    if known(estimator.solver, _SOLVERS, "solver") == "scd":
        raise InputError(
            "partial_fit takes steps of stochastic gradient descent, and solver='scd' needs all"
            " rows in each step; call fit, or take solver='sgd'"
        )
    return True


def _documented(estimator: type[E]) -> type[E]:
    """Add what an estimator inherits to its docstring."""
    inherited = [
        base.__doc__ or "" for base in (_Linear, _Classifier) if issubclass(estimator, base)
    ]
    bodies = [text.partition("\n")[2] for text in inherited]
    estimator.__doc__ = (estimator.__doc__ or "") + "".join(bodies)
    return estimator


@dataclass(kw_only=True, eq=False, repr=False)
class _Linear(BaseEstimator):  # type: ignore[misc]
    """What the estimators share: their parameters, and a training on all ranks.

    Parameters
    ----------
    l2, l1
        The model minimises the mean loss + l2 / 2 · |w|₂² + l1 · |w|₁, without the intercepts.
    solver
        ``"sgd"``, mini-batch stochastic gradient descent, or ``"scd"``, block coordinate descent:
        more exact, for two classes or regression and a loss with a derivative everywhere. Of the
        parameters from ``batch_size`` on it uses only ``block``, ``fit_intercept``,
        ``asynchronous`` and ``random_state``.
    epochs
        The most passes over the rows, or, with ``"scd"``, over the coordinates.
    tol
        Training ends earlier when five epochs (of few rows, 100 steps) did not bring the mean loss
        ``tol`` below the lowest before them; None goes through all epochs.
    batch_size
        The most rows that each rank takes one step with, in [1, 32768].
    step
        ``"adagrad"``, ``"constant"``, ``"inverse"``, ``"inverse_sqrt"``, ``"bold_driver"``, or a
        function from the epochs done to the size of a step: see `sparcel.linear.step_sizes`.
    eta0
        The size of the first step.
    average
        Whether the model is the average of the models after each step.
    block
        With ``"scd"``, the most coordinates that each rank changes in a step.
    fit_intercept
        Whether the model has an intercept.
    asynchronous
        Whether a gradient is computed while the one before is summed over the ranks. The model that
        it is taken at is then older by one step, on every rank and in every run.
    algorithm
        How ranks share gradients. ``"sharded"`` gives each coordinate an owner, to which gradients
        go and from which each rank gets what its next batch needs. Otherwise every rank holds the
        whole model, and gradients are summed by this algorithm of `sparcel.all_reduce`.
    format
        How gradients are laid out in messages where they are summed: ``"packed"``, or ``"coo"``,
        which is faster on networks beyond 10 Gbit/s.
    random_state
        Decides the order of the rows and of the batches.

    Attributes
    ----------
    coef_
        ``[classes, features]``, one row for two classes; for regression ``[features]``.
    intercept_
        ``[classes]``, or one number.
    epochs_
        What each epoch was like, a list of `Epoch`.
    n_iter_
        How many epochs the model was trained for.
    """

    l2: float = 1e-6
    l1: float = 0.0
    solver: Literal["sgd", "scd"] = "sgd"
    epochs: int = 100
    tol: float | None = 1e-3
    batch_size: int = 1000
    step: Rule = "adagrad"
    eta0: float = 0.5
    average: bool = False
    block: int = 100
    fit_intercept: bool = True
    asynchronous: bool = False
    algorithm: str = "sharded"
    format: str = "packed"
    random_state: int = 0

    coef_: Any = field(init=False)
    intercept_: Any = field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _settings(self, loss: str) -> Settings:
        own = {"solver", "block", "random_state"}
        shared = {one.name for one in fields(_Linear) if one.init} - own
        chosen = {name: getattr(self, name) for name in shared}
        return Settings(loss=loss, seed=self.random_state, **chosen)

    def _train(
        self,
        X: Any,
        targets: Array,
        row_weights: Array | None,
        width: int,
        loss: str,
        comm: Communicator | None,
        once: bool,
    ) -> None:
        """Fit the model, or pass ``once`` over more rows; all ranks call."""
        settings, rows = self._settings(loss), as_rows(X)
        trainer: Sgd | Scd
        weights = None
        if known(self.solver, _SOLVERS, "solver") == "scd":
            trainer = settings.scd(rows, targets, row_weights, self.block, comm)
        else:
            weights = self._begin(settings, rows, width) if once else None
            trainer = prepare(rows, targets, row_weights, width, settings, comm, weights)
            trainer.epochs = getattr(self, "n_iter_", 0) if once else 0
        epochs: list[Epoch] = []
        if once:
            epochs.append(trainer.epoch())
        else:
            train(trainer, settings, epochs.append)
        # A pass over more rows goes on from here.
        self._weights = trainer.model.whole() if isinstance(trainer, Sgd) else None
        self.epochs_, self.n_iter_ = epochs, trainer.epochs
        coefficients, intercepts = (self._weights or trainer).read()
        self.coef_, self.intercept_ = coefficients.T, intercepts.astype(coefficients.dtype)

    def _begin(self, settings: Settings, rows: Rows, width: int) -> Weights:
        """Return the model that a pass begins with: where the last one, or `fit`, ended."""
        weights = Weights(**settings.weights(rows.dimensions, width, rows.values.dtype))
        kept: Weights | None = getattr(self, "_weights", None)
        if kept is not None and kept.is_like(weights):
            return kept
        if hasattr(self, "n_iter_"):
            self.densify()
            weights.load(np.reshape(self.coef_, (width, -1)).T, np.ravel(self.intercept_))
        return weights

    def _checked(
        self, X: Any, y: Any, comm: Communicator | None, fresh: bool, **more: Any
    ) -> tuple[Any, Array]:
        """Return checked rows and labels; what is wrong on one rank is raised on all."""
        kept: Weights | None = None if fresh else getattr(self, "_weights", None)
        X, y = as_matrix(X, y, comm, None if fresh else self.n_features_in_)
        settings = {
            "accept_sparse": "csr",
            "dtype": _FLOATS if kept is None else kept.dtype,
            "ensure_min_samples": 1 if comm is None else 0,
            "reset": fresh,
            **more,
        }
        checked: tuple[Any, Array] = together(comm, lambda: validate_data(self, X, y, **settings))
        return checked

    def _scores(self, X: Any) -> Array:
        check_is_fitted(self, "coef_")
        X, _ = as_matrix(X, dimensions=self.n_features_in_)
        X = validate_data(self, X, accept_sparse="csr", dtype=_FLOATS, reset=False)
        scores = X @ self.coef_.T
        dense: Array = (scores.toarray() if sp.issparse(scores) else scores) + self.intercept_
        return dense

    def sparsify(self) -> Self:
        """Make ``coef_`` a sparse matrix, which is smaller where most coordinates are zero."""
        check_is_fitted(self, "coef_")
        self.coef_ = sp.csr_matrix(self.coef_)
        return self

    def densify(self) -> Self:
        """Make ``coef_`` an array again."""
        check_is_fitted(self, "coef_")
        if sp.issparse(self.coef_):
            dense = self.coef_.toarray()
            self.coef_ = dense[0] if isinstance(self, RegressorMixin) else dense
        return self


@dataclass(kw_only=True, eq=False, repr=False)
class _Classifier(ClassifierMixin, _Linear):  # type: ignore[misc]
    """A linear classifier; with more than two classes, each is told from all others.

    Parameters
    ----------
    class_weight
        The weight of each class's rows by label, 1 where none is given; ``"balanced"`` gives all
        classes the same weight in all.

    Attributes
    ----------
    classes_
        ``[classes]`` the labels, sorted.
    """

    class_weight: Mapping[Any, float] | str | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = self.solver != "scd"
        return tags

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
            ``[rows]``, not negative.
        group
            The ranks that fit the model together, as for `sparcel.all_reduce`; all of them call.
            Without it, these are the ranks that this process was launched with.
        """
        return self._fit(X, y, sample_weight, group, once=False)

    @available_if(_takes_steps)  # type: ignore[untyped-decorator]
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
            All labels that will ever come. The first call needs it, unless all occur in ``y``.
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
        together(comm, lambda: check_classification_targets(y))
        if fresh:
            self.classes_ = Classes.of(y if classes is None else np.asarray(classes), comm).labels
        classes_known = Classes(self.classes_)
        if self.solver == "scd" and classes_known.width > 1:
            raise InputError(
                "Only binary classification is supported by solver='scd', got labels of"
                f" {classes_known.width} classes; solver='sgd' tells each class from the rest"
            )
        numbers = together(comm, lambda: classes_known.numbers(y))
        given = together(comm, lambda: sample_weights(sample_weight, len(y), X.dtype))
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

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, group: Group = None) -> Self:
        """Fit the model to the rows of all ranks; ``y`` holds numbers, ``[rows]``.

        Otherwise as `SparseLogisticRegression.fit`.
        """
        return self._fit(X, y, sample_weight, group, once=False)

    @available_if(_takes_steps)  # type: ignore[untyped-decorator]
    def partial_fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, group: Group = None
    ) -> Self:
        """Pass once over more rows, from where the model is; otherwise as `fit`."""
        return self._fit(X, y, sample_weight, group, once=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any, group: Group, once: bool) -> Self:
        fresh = not (once and hasattr(self, "coef_"))
        comm = ranks_of(group)
        X, y = self._checked(X, y, comm, fresh, y_numeric=True)
        row_weights = together(comm, lambda: sample_weights(sample_weight, len(y), X.dtype))
        targets = np.ascontiguousarray(y, dtype=X.dtype)
        self._train(X, targets, row_weights, 1, "squared", comm, once)
        self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])
        return self

    def predict(self, X: Any) -> Array:
        """Return the value of each row, ``[rows]``."""
        scores = self._scores(X)
        return scores[:, 0] if scores.ndim == 2 else scores
