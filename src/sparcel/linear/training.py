"""From rows to a trained model, on one rank or many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.linear.batches import arrange, most_entries
from sparcel.linear.exchange import Exchange
from sparcel.linear.ranks import check_alike, gathered
from sparcel.linear.scd import Scd
from sparcel.linear.sgd import Epoch, Sgd
from sparcel.linear.step_sizes import Rule, StepSizes
from sparcel.linear.weights import Weights
from sparcel.rows import Rows
from sparcel.rows.rows import Array


@dataclass(frozen=True)
class Settings:
    """How a model is trained; the estimators and the command describe each."""

    loss: str = "logistic"
    l1: float = 0.0
    l2: float = 1e-6
    epochs: int = 100
    tol: float | None = 1e-3
    batch_size: int = 1000
    step: Rule = "adagrad"
    eta0: float = 0.5
    average: bool = False
    fit_intercept: bool = True
    asynchronous: bool = False
    algorithm: str = "auto"
    seed: int = 0

    def weights(self, dimensions: int, width: int, dtype: np.dtype) -> Weights:
        """Return a model that is zero."""
        adaptive = StepSizes(self.step, self.eta0).adaptive
        if self.average and (self.l1 > 0 or (adaptive and self.l2 > 0)):
            raise InputError(
                "average=True goes with l1=0, and with step='adagrad' only if l2=0 as well: the"
                " average would miss what regularisation still owes to rarely seen coordinates;"
                " leave one of them out"
            )
        return Weights(
            *(dimensions, width, self.l1, self.l2, adaptive, self.average, dtype),
            self.fit_intercept,
        )

    def scd(
        self,
        rows: Rows,
        targets: Array,
        row_weights: Array | None,
        block: int,
        comm: Communicator | None,
    ) -> Scd:
        """Return what trains a model by coordinate descent; all ranks call."""
        return Scd(
            *(rows, targets, row_weights, self.loss, self.l1, self.l2),
            block=block,
            comm=comm,
            seed=self.seed,
            asynchronous=self.asynchronous,
            fit_intercept=self.fit_intercept,
        )


_PATIENT_EPOCHS, _PATIENT_STEPS = 5, 100
"""Training ends early when so many epochs, and so many steps, lowered the loss too little."""


def prepare(
    rows: Rows,
    targets: Array,
    row_weights: Array | None,
    weights: Weights,
    settings: Settings,
    comm: Communicator | None = None,
) -> Sgd:
    """Arrange a rank's rows in batches and agree with the others on what they share.

    Parameters
    ----------
    rows, targets, row_weights
        This rank's; see `sparcel.linear.batches.arrange`. A rank may have none.
    weights
        The model to train, equal on all ranks.
    comm
        The ranks; None for one alone. All of them call.

    Raises
    ------
    InputError
        On all ranks, when no rank has rows or the ranks' models differ in shape.
    """
    rank = 0 if comm is None else comm.rank
    order = np.random.default_rng([settings.seed, rank]).permutation(len(rows))
    batches = arrange(rows, targets, row_weights, settings.batch_size, order)
    weight = sum(batch.weight for batch in batches)
    check_alike(comm, len(rows), weight, weights.dimensions, weights.dtype)
    own = [len(batches), most_entries(batches)]
    steps, entries = zip(*gathered(comm, own), strict=True)
    return Sgd(
        weights,
        batches,
        max(steps),
        settings.loss,
        StepSizes(settings.step, settings.eta0),
        Exchange(comm, settings.algorithm, max(entries)),
        settings.asynchronous,
        settings.seed,
    )


def train(
    trainer: Sgd | Scd,
    settings: Settings,
    after_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> None:
    """Train until the epochs are over, or the loss stops falling by ``tol``; all ranks call."""
    losses: list[float] = []
    patience = max(_PATIENT_EPOCHS, -(-_PATIENT_STEPS // trainer.steps))
    while trainer.epochs < settings.epochs:
        epoch = trainer.epoch()
        after_epoch(epoch)
        losses.append(epoch.loss)
        if settings.tol is not None and len(losses) > patience:
            before, lately = min(losses[:-patience]), min(losses[-patience:])
            if lately > before - settings.tol:
                break
