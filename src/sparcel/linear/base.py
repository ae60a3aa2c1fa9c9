"""What the estimators share: their parameters, and a training on all ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from sparcel.comm import Communicator
from sparcel.errors import InputError, known, optional
from sparcel.linear.epoch import Epoch
from sparcel.linear.inputs import as_matrix, as_rows, opened, product
from sparcel.linear.parameters import SOLVERS, Parameters
from sparcel.linear.ranks import run_or_fail_everywhere
from sparcel.linear.settings import Settings
from sparcel.linear.sgd.prepare import prepare
from sparcel.linear.sgd.weights import MOST_HELD, Weights
from sparcel.linear.sgd.whole import WholeModel
from sparcel.linear.trainer import Trainer
from sparcel.linear.training import make_trainer, still_falls, train
from sparcel.rows import Rows
from sparcel.rows.rows import Array

with optional("sparcel.linear", "linear"):
    import scipy.sparse as sp
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils.validation import check_is_fitted, validate_data

_FLOATS = [np.float32, np.float64]


def takes_steps(estimator: LinearBase) -> bool:
    """Tell whether an estimator can go on with other rows; raise why not."""
    if known(estimator.solver, SOLVERS, "solver") == "scd":
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


@dataclass(kw_only=True, eq=False, repr=False)
class LinearBase(Parameters, BaseEstimator):  # type: ignore[misc]
    """What the estimators share: their parameters, and a training on all ranks.

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

    coef_: Any = field(init=False)
    intercept_: Any = field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _settings(self, loss: str) -> Settings:
        chosen = {one.name: getattr(self, one.name) for one in fields(Parameters)}
        return Settings(loss=loss, **chosen)

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
        settings, rows = run_or_fail_everywhere(comm, lambda: self._settings(loss)), as_rows(X)
        epochs: list[Epoch] = []
        trainer: Trainer
        if once:
            weights = self._begin(settings, rows, width)
            trainer = prepare(rows, targets, row_weights, width, settings, comm, weights)
            trainer.epochs = getattr(self, "n_iter_", 0)
            epochs.append(trainer.epoch())
        else:
            trainer = make_trainer(rows, targets, row_weights, width, settings, comm)
            train(trainer, settings, epochs.append)
            trainer.forget_rows()
            if still_falls(trainer, settings):
                warnings.warn(
                    f"the loss was still falling by more than tol={settings.tol} after"
                    f" {settings.epochs} epochs: allow more, or choose eta0 to the scale of the"
                    " data, as regression needs, or solver='scd'",
                    ConvergenceWarning,
                    stacklevel=3,
                )
        fitted, whole = trainer.fitted()
        fitted.check()
        self._whole = whole  # a pass over more rows goes on from it
        self.epochs_, self.n_iter_ = epochs, trainer.epochs
        is_wide = rows.dimensions > MOST_HELD
        self.coef_ = fitted.sparse() if is_wide else fitted.dense().T
        self.intercept_ = fitted.intercepts.astype(self.coef_.dtype)

    def _begin(self, settings: Settings, rows: Rows, width: int) -> Weights:
        """Return the model that a pass begins with: where the last one, or `fit`, ended."""
        arguments = settings.weights(rows.dimensions, width, rows.values.dtype)
        kept: WholeModel | None = getattr(self, "_whole", None)
        if kept is not None and kept.is_like(arguments):
            return kept.expanded()
        weights = Weights(**arguments)
        if hasattr(self, "n_iter_"):
            self.densify()
            weights.load(np.reshape(self.coef_, (width, -1)).T, np.ravel(self.intercept_))
        return weights

    def _checked(
        self, X: Any, y: Any, comm: Communicator | None, fresh: bool, **more: Any
    ) -> tuple[Any, Array]:
        """Return checked rows and labels; what is wrong on one rank is raised on all."""
        kept: WholeModel | None = None if fresh else getattr(self, "_whole", None)
        X = opened(X, comm, None if fresh else self.n_features_in_)
        settings = {
            "accept_sparse": "csr",
            "dtype": _FLOATS if kept is None else kept.weights.dtype,
            "ensure_min_samples": 1 if comm is None else 0,
            "reset": fresh,
            **more,
        }

        def check() -> tuple[Any, Array]:
            matrix, labels = as_matrix(X, y)
            checked: tuple[Any, Array] = validate_data(self, matrix, labels, **settings)
            return checked

        return run_or_fail_everywhere(comm, check)

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
