"""From rows to a trained model, on one rank or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparcel.comm import Communicator
from sparcel.linear.epoch import Epoch
from sparcel.linear.scd.solver import Scd
from sparcel.linear.settings import Settings
from sparcel.linear.sgd.prepare import prepare
from sparcel.linear.trainer import Trainer
from sparcel.rows import Rows
from sparcel.rows.rows import Array

_PATIENT_EPOCHS, _PATIENT_STEPS = 5, 100
"""Training ends early when so many epochs, and so many steps, lowered the loss too little."""


def make_trainer(
    rows: Rows,
    targets: Array,
    row_weights: Array | None,
    width: int,
    settings: Settings,
    comm: Communicator | None = None,
) -> Trainer:
    """Return what trains a new model by the solver that was chosen; otherwise as `prepare`."""
    make = prepare if settings.solver == "sgd" else Scd
    return make(rows, targets, row_weights, width, settings, comm)


def train(
    trainer: Trainer,
    settings: Settings,
    after_epoch: Callable[[Epoch], None] = lambda epoch: None,
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Train until the epochs are over, or the loss stops falling by ``tol``; all ranks call."""
    patience = max(_PATIENT_EPOCHS, -(-_PATIENT_STEPS // trainer.steps))
    while trainer.epochs < settings.epochs and not _stalls(trainer.losses, patience, settings.tol):
        after_epoch(trainer.epoch(after_step))


def still_falls(trainer: Trainer, settings: Settings) -> bool:
    """Tell whether all epochs were used and the loss was still falling by more than ``tol``."""
    stalls = _stalls(trainer.losses, _PATIENT_EPOCHS, settings.tol)
    return settings.tol is not None and trainer.epochs >= settings.epochs and not stalls


def _stalls(losses: Sequence[float], patience: int, tol: float | None) -> bool:
    """Tell whether the last ``patience`` losses are not ``tol`` below the lowest before them."""
    if tol is None or len(losses) <= patience:
        return False
    return min(losses[-patience:]) > min(losses[:-patience]) - tol
