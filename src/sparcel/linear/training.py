"""From rows to a trained model, on one rank or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparcel import _cpu
from sparcel._checks import flag, number, whole_number
from sparcel.collectives import ALGORITHMS
from sparcel.comm import Communicator
from sparcel.errors import InputError, known
from sparcel.formats import FORMATS_BY_NAME, Qsgd
from sparcel.linear.batches import MOST_ROWS, TAIL, Batch, arrange, most_entries
from sparcel.linear.lossy import Lossy
from sparcel.linear.numbering import by_frequency
from sparcel.linear.ranks import check_alike, gathered, together
from sparcel.linear.replicated import Replicated
from sparcel.linear.scd import Scd
from sparcel.linear.sgd import Epoch, Sgd
from sparcel.linear.sharded import Sharded
from sparcel.linear.step_sizes import Rule, StepSizes
from sparcel.linear.updates import GATHERS
from sparcel.linear.weights import Weights
from sparcel.rows import Rows, check
from sparcel.rows.rows import Array
from sparcel.schemes.density import checked_density, count_for

LOSSES = ("logistic", "hinge", "squared_hinge", "squared")

_BITS = (8, 4)
_BUCKET = 64
"""Values that share a scale. Columns are as different as their frequencies, so a scale for few is
worth its half a bit a value."""

SOLVERS = ("sgd", "scd")

SHARDED = "sharded"
"""The name of what `Sharded` does, beside those of the algorithms of `sparcel.all_reduce`."""


@dataclass(frozen=True)
class Settings:
    """How a model is trained; the estimators and the command describe each."""

    loss: str = "logistic"
    solver: str = "sgd"
    l1: float = 0.0
    l2: float = 1e-6
    epochs: int = 100
    tol: float | None = 1e-3
    batch_size: int = 1000
    step: Rule = "adagrad"
    eta0: float = 0.5
    average: bool = False
    block: int = 100
    gather: str = "nothing"
    fit_intercept: bool = True
    asynchronous: bool = False
    algorithm: str = "sharded"
    format: str = "packed"
    density: float | None = None
    bits: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        known(self.loss, LOSSES, "loss")
        known(self.solver, SOLVERS, "solver")
        number(self.l1, "l1", at_least=0)
        number(self.l2, "l2", at_least=0)
        whole_number(self.epochs, "epochs", at_least=1)
        if self.tol is not None:
            number(self.tol, "tol", at_least=0)
        whole_number(self.batch_size, "batch_size", at_least=1, at_most=MOST_ROWS)
        StepSizes(self.step, number(self.eta0, "eta0", above=0))
        whole_number(self.block, "block", at_least=1)
        known(self.gather, GATHERS, "gather")
        for name in ("average", "fit_intercept", "asynchronous"):
            flag(getattr(self, name), name)
        known(self.algorithm, (SHARDED, "auto", *ALGORITHMS), "algorithm")
        known(self.format, FORMATS_BY_NAME, "format")
        if self.density is not None:
            checked_density(self.density)
            self._goes_with("density", "auto", *ALGORITHMS.keys() - {"dense"})
        if self.bits is not None:
            if self.bits not in _BITS:
                raise InputError(f"bits must be 8, 4 or None for all, got {self.bits!r}")
            self._goes_with("bits", SHARDED, "auto", "split_allgather")
        whole_number(self.seed, "the seed", at_least=0)

    def _goes_with(self, name: str, *algorithms: str) -> None:
        """Refuse an algorithm that has no use for a setting."""
        if self.algorithm not in algorithms:
            raise InputError(
                f"{name}={getattr(self, name)} goes with algorithm="
                f"{' or '.join(map(repr, sorted(algorithms)))}, got {self.algorithm!r};"
                f" choose one of these, or leave out {name}"
            )

    def quantizer(self) -> Qsgd | None:
        """Return what rounds the values of gradients; None where they travel as they are."""
        if self.bits is None:
            return None
        return Qsgd(self.bits, _BUCKET, self.seed, packed=self.format == "packed")

    def described(self) -> str:
        """Return a text that is the same for the same settings, in any process."""
        step = getattr(self.step, "__qualname__", self.step)
        return ", ".join(f"{name}={value}" for name, value in {**vars(self), "step": step}.items())

    def weights(self, dimensions: int, width: int, dtype: Any) -> dict[str, Any]:
        """Return the arguments of the model's `Weights`."""
        adaptive = StepSizes(self.step, self.eta0).adaptive
        if self.average and (self.l1 > 0 or (adaptive and self.l2 > 0)):
            raise InputError(
                "average=True goes with l1=0, and with step='adagrad' only if l2=0 as well: the"
                " average would miss what regularisation still owes to rarely seen coordinates;"
                " leave one of them out"
            )
        return {
            "dimensions": dimensions,
            "width": width,
            "l1": self.l1,
            "l2": self.l2,
            "adaptive": adaptive,
            "average": self.average,
            "dtype": dtype,
            "intercept": self.fit_intercept,
        }


_PATIENT_EPOCHS, _PATIENT_STEPS = 5, 100
"""Training ends early when so many epochs, and so many steps, lowered the loss too little."""


def prepare(
    rows: Rows,
    targets: Array,
    row_weights: Array | None,
    width: int,
    settings: Settings,
    comm: Communicator | None = None,
    weights: Weights | None = None,
) -> Sgd:
    """Arrange a rank's rows for SGD and agree with the others on what they share.

    Parameters
    ----------
    rows, targets, row_weights
        This rank's; see `sparcel.linear.batches.arrange`. A rank may have none.
    width
        Number of classes that are told from the rest, 1 for two classes and for regression.
    comm
        The ranks; None for one alone. All of them call.
    weights
        The model to go on from, equal on all ranks, each of which keeps the whole; None for a new
        one.

    Raises
    ------
    InputError
        On all ranks, when no rank has rows or the ranks' models differ in shape.
    """
    together(comm, lambda: check(rows))
    rank, dimensions = 0 if comm is None else comm.rank, rows.dimensions
    numbering = by_frequency(rows) if comm is None and weights is None else None
    order = np.random.default_rng([settings.seed, rank]).permutation(len(rows))
    batches = arrange(rows, targets, row_weights, settings.batch_size, order, numbering)
    _cpu.drop_kept()  # what reading and arranging took, as much as a piece of the rows
    dtype = rows.values.dtype
    weight = sum(batch.weight for batch in batches)
    check_alike(
        comm, len(batches), weight, dimensions, dtype, f"{settings.described()}, width={width}"
    )
    counts, entries = zip(*gathered(comm, [len(batches), most_entries(batches)]), strict=True)
    arguments = settings.weights(dimensions, width, dtype)
    model: Replicated | Sharded
    if settings.algorithm == SHARDED and comm is not None and weights is None:
        model = Sharded(arguments, batches, comm, settings.quantizer())
    else:
        by = "auto" if settings.algorithm == SHARDED else settings.algorithm
        exchange = {"algorithm": by, "format": settings.format, "max_nnz": max(entries)}
        if numbering is not None:
            arguments["dimensions"] = len(numbering.columns)
        whole = weights or Weights(**arguments)
        if comm is not None and (settings.bits or settings.density):
            model = _lossy(settings, whole, batches, comm, exchange)
        else:
            columns = None if numbering is None else numbering.columns
            model = Replicated(whole, batches, comm, exchange, columns, dimensions)
    sizes = StepSizes(settings.step, settings.eta0)
    return Sgd(
        model, batches, counts, settings.loss, sizes, comm, settings.asynchronous, settings.seed
    )


def _lossy(
    settings: Settings,
    weights: Weights,
    batches: Sequence[Batch],
    comm: Communicator,
    exchange: dict[str, Any],
) -> Lossy:
    """Return a whole model on this rank, of whose gradients a part is sent."""
    quantizer, count = settings.quantizer(), None
    if quantizer is not None and weights.width > 1:
        raise InputError(
            f"bits={settings.bits} goes with one class that is told from the rest where gradients"
            f" are summed on all ranks, got {weights.width} classes; leave out bits, or call fit"
            " with algorithm='sharded'"
        )
    if settings.density is not None:
        count = count_for(settings.density, weights.dimensions)
        exchange["max_nnz"] = min(exchange["max_nnz"], count + TAIL)
    return Lossy(weights, batches, comm, exchange, count, quantizer)


def trainer_of(
    rows: Rows,
    targets: Array,
    row_weights: Array | None,
    width: int,
    settings: Settings,
    comm: Communicator | None = None,
) -> Sgd | Scd:
    """Return what trains a new model by the solver that was chosen; otherwise as `prepare`."""
    if settings.solver == "sgd":
        return prepare(rows, targets, row_weights, width, settings, comm)
    return Scd(
        *(rows, targets, row_weights, settings.loss, settings.l1, settings.l2),
        block=settings.block,
        gather=settings.gather,
        comm=comm,
        seed=settings.seed,
        asynchronous=settings.asynchronous,
        fit_intercept=settings.fit_intercept,
        width=width,
    )


def train(
    trainer: Sgd | Scd,
    settings: Settings,
    after_epoch: Callable[[Epoch], None] = lambda epoch: None,
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Train until the epochs are over, or the loss stops falling by ``tol``; all ranks call."""
    patience = max(_PATIENT_EPOCHS, -(-_PATIENT_STEPS // trainer.steps))
    while trainer.epochs < settings.epochs and not _stalls(trainer.losses, patience, settings.tol):
        after_epoch(trainer.epoch(after_step))


def _stalls(losses: Sequence[float], patience: int, tol: float | None) -> bool:
    """Tell whether the last ``patience`` losses are not ``tol`` below the lowest before them."""
    if tol is None or len(losses) <= patience:
        return False
    return min(losses[-patience:]) > min(losses[:-patience]) - tol
