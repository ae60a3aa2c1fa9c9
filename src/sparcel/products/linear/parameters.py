"""How a model is trained: described once, for the estimators and for the command; and its steps.

This module imports little, so that the command starts quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sparcel.errors import InputError, checked_name

Rule: TypeAlias = str | Callable[[float], float]
"""The name of a rule for the size of steps, or a function from the epochs done, 1.5 after one and a
half, to a size."""

LOSSES = ("logistic", "hinge", "squared_hinge", "squared")
SOLVERS = ("sgd", "scd")

RULES: dict[str, Callable[[float], float]] = {
    "adagrad": lambda _: 1.0,
    "constant": lambda _: 1.0,
    "inverse": lambda epochs: 1 / (1 + epochs),
    "inverse_sqrt": lambda epochs: 1 / (1 + epochs) ** 0.5,
    "bold_driver": lambda _: 1.0,
}
"""What a rule makes of the first step's size, by the epochs done."""

_GROWTH, _CUT = 1.05, 0.5

OF_ONE_SOLVER = {
    "sgd": ("batch_size", "step", "eta0", "average", "algorithm", "format", "density", "bits"),
    "scd": ("block",),
}
"""The parameters of each solver that the other does not use."""


@dataclass(kw_only=True, eq=False, repr=False)
class Parameters:
    """How a model is trained.

    Parameters
    ----------
    l2
        The weight of ``|w|₂² / 2`` beside the mean loss in what is minimised; intercepts do not
        count.
    l1
        The weight of ``|w|₁`` beside the mean loss.
    solver
        ``"sgd"``, mini-batch stochastic gradient descent, or ``"scd"``, block coordinate descent:
        more exact and slower, for a loss with a derivative everywhere, as hinge is not.
    epochs
        The most passes over the rows, or, with ``"scd"``, over the coordinates.
    tol
        Training ends earlier when five epochs (of few rows, 100 steps) did not bring the mean loss
        so much below the lowest before them; None goes through all epochs. ``"scd"`` goes on to a
        tenth of it, because its losses are exact; in a regression it is a share of the variance of
        the targets. The penalty does not count: where ``l2`` or ``l1`` is so large that it rules,
        only None goes to the end.
    batch_size
        The most rows that each rank takes one step with, in [1, 32768].
    step
        The rule for the size of steps: ``"adagrad"``, ``"constant"``, ``"inverse"``,
        ``"inverse_sqrt"`` or ``"bold_driver"``; in Python also a function from the epochs done to
        a size.
    eta0
        The size of the first step; for ``"adagrad"`` in a regression, in standard deviations of the
        targets.
    average
        Whether the model is the average of the models after each step. Needs l1 = 0.
    block
        With ``"scd"``, the most coordinates of each rank that change in a step.
    fit_intercept
        Whether the model has an intercept.
    asynchronous
        Whether a gradient is computed while the one before is summed over the ranks. The model that
        it is taken at is then older by one step, on every rank and in every run, except in the
        first step of an epoch.
    algorithm
        How ranks share gradients. ``"sharded"`` gives each coordinate an owner, to which gradients
        go and from which each rank gets what its next batch needs. Otherwise every rank holds the
        whole model, and gradients are summed by this algorithm of `sparcel.all_reduce`:
        ``"auto"``, ``"dense"``, ``"split_allgather"`` and their like.
    format
        How gradients are laid out in messages where they are summed: ``"packed"``, or ``"raw"``,
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
    density: float | None = None
    bits: int | None = None
    random_state: int = 0


class StepSizes:
    """The sizes of the steps of one training.

    Parameters
    ----------
    rule
        One of `RULES`, which multiply ``eta0``, or a function from the epochs done to the size.
        ``"adagrad"`` also divides each coordinate's step by the root of its squared gradients so
        far; ``"bold_driver"`` changes the size by 1.05 after an epoch whose loss was lower than
        that of the epoch before, and by 0.5 otherwise.
    eta0
        The first step's size. A function gives sizes itself, and does not use it.

    Raises
    ------
    InputError
        When there is no rule of that name.
    """

    def __init__(self, rule: Rule, eta0: float) -> None:
        self.adaptive = rule == "adagrad"
        self._is_bold = rule == "bold_driver"
        self._rule = rule if callable(rule) else RULES[checked_name(rule, RULES, "step")]
        self._given = callable(rule)
        self.size, self.last_loss = eta0, float("inf")

    def at(self, epochs: float) -> float:
        """Return the size of a step after so many epochs."""
        size = self._rule(epochs) * (1 if self._given else self.size)
        if not 0 <= size < float("inf"):
            raise InputError(f"a step's size must be finite and not negative, got {size}")
        return size

    def epoch_ended(self, loss: float) -> None:
        """Take note of an epoch's mean loss."""
        if self._is_bold:
            self.size *= _GROWTH if loss < self.last_loss else _CUT
        self.last_loss = loss
