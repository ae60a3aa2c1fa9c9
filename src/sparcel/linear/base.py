"""What the estimators share: their parameters, and a training on all ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

import numpy as np

from sparcel.comm import Communicator
from sparcel.errors import InputError, known, optional
from sparcel.linear.epoch import Epoch
from sparcel.linear.inputs import as_matrix, as_rows, opened, product
from sparcel.linear.ranks import together
from sparcel.linear.scd import Scd
from sparcel.linear.settings import SOLVERS, Settings
from sparcel.linear.sgd import Sgd
from sparcel.linear.sgd.prepare import prepare
from sparcel.linear.sgd.step_sizes import Rule
from sparcel.linear.sgd.weights import MOST_HELD, Weights
from sparcel.linear.sgd.whole import Whole
from sparcel.linear.training import still_falls, train, trainer_of
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
class LinearBase(BaseEstimator):  # type: ignore[misc]
    """What the estimators share: their parameters, and a training on all ranks.

    Parameters
    ----------
    l2, l1
        The model minimises the mean loss + l2 / 2 · |w|₂² + l1 · |w|₁, without the intercepts.
    solver
        ``"sgd"``, mini-batch stochastic gradient descent, or ``"scd"``, block coordinate descent:
        more exact, for a loss with a derivative everywhere. Of the parameters from ``batch_size``
        on it uses only ``block``, ``gather``, ``fit_intercept``, ``asynchronous`` and
        ``random_state``.
    epochs
        The most passes over the rows, or, with ``"scd"``, over the coordinates.
    tol
        Training ends earlier when five epochs (of few rows, 100 steps) did not bring the mean loss
        ``tol`` below the lowest before them; None goes through all epochs. The penalty does not
        count: where ``l2`` or ``l1`` is so large that it rules, only None goes to the end.
    batch_size
        The most rows that each rank takes one step with, in [1, 32768].
    step
        ``"adagrad"``, ``"constant"``, ``"inverse"``, ``"inverse_sqrt"``, ``"bold_driver"``, or a
        function from the epochs done to the size of a step: see `sparcel.linear.sgd.step_sizes`.
    eta0
        The size of the first step.
    average
        Whether the model is the average of the models after each step. Needs ``l1=0``, and with
        ``"adagrad"`` ``l2=0``.
    block
        With ``"scd"``, the most coordinates of each rank that change in a step.
    gather
        With ``"scd"``, what ranks send one another after they have summed derivatives:
        ``"nothing"``, as every rank computes all new values itself; or ``"sparse"``, the
        coordinates that changed, as in SparCML. The model is the same.
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
        which takes less work and more bytes.
    density
        Share of the coordinates, in (0, 1], that a rank sends of its gradient in a step: the
        largest. It keeps the rest, and adds it to the gradient of its next batch that has the same
        columns. For algorithms that sum; None sends all.
    bits
        8 or 4: the values of gradients travel in so many bits, rounded without bias. For
        ``"sharded"``, ``"split_allgather"`` and ``"auto"``; None sends them as they are.
    random_state
        Decides the order of the rows and of the batches, and the rounding.

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
    gather: Literal["nothing", "sparse"] = "nothing"
    fit_intercept: bool = True
    asynchronous: bool = False
    algorithm: str = "sharded"
    format: str = "packed"
    density: float | None = None
    bits: int | None = None
    random_state: int = 0

    coef_: Any = field(init=False)
    intercept_: Any = field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _settings(self, loss: str) -> Settings:
        shared = {one.name for one in fields(LinearBase) if one.init} - {"random_state"}
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
        settings, rows = together(comm, lambda: self._settings(loss)), as_rows(X)
        epochs: list[Epoch] = []
        trainer: Sgd | Scd
        if once:
            weights = self._begin(settings, rows, width)
            trainer = prepare(rows, targets, row_weights, width, settings, comm, weights)
            trainer.epochs = getattr(self, "n_iter_", 0)
            epochs.append(trainer.epoch())
        else:
            trainer = trainer_of(rows, targets, row_weights, width, settings, comm)
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
        # A pass over more rows goes on from here.
        self._whole = trainer.model.whole() if isinstance(trainer, Sgd) else None
        self.epochs_, self.n_iter_ = epochs, trainer.epochs
        if self._whole is not None and rows.dimensions > MOST_HELD:
            self.coef_, intercepts = self._whole.read_sparse()
        else:
            coefficients, intercepts = (self._whole or trainer).read()
            self.coef_ = coefficients.T
        self.intercept_ = intercepts.astype(self.coef_.dtype)

    def _begin(self, settings: Settings, rows: Rows, width: int) -> Weights:
        """Return the model that a pass begins with: where the last one, or `fit`, ended."""
        arguments = settings.weights(rows.dimensions, width, rows.values.dtype)
        kept: Whole | None = getattr(self, "_whole", None)
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
        kept: Whole | None = None if fresh else getattr(self, "_whole", None)
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

        return together(comm, check)

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
