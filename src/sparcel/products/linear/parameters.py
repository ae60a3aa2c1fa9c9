"""How a model is trained: described once, for the estimators and for the command.

This module imports little, so that the command starts quickly.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Rule: TypeAlias = str | Callable[[float], float]
"""The name of a rule for the size of steps, or a function from the epochs done, 1.5 after one and a
half, to a size."""

LOSSES = ("logistic", "hinge", "squared_hinge", "squared")
SOLVERS = ("sgd", "scd")

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


def descriptions() -> dict[str, str]:
    """Return what the docstring of `Parameters` says of each, as one line of plain text."""
    _, _, section = (inspect.getdoc(Parameters) or "").partition("----------\n")
    parts = re.split(r"^(\w.*)\n", section, flags=re.MULTILINE)[1:]
    texts = [re.sub(r'``"?|"?``|`', "", " ".join(text.split())) for text in parts[1::2]]
    return dict(zip(parts[::2], texts, strict=True))
