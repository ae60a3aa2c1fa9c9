"""What every solver is given, settings and examples, and what it does."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import hypot, sqrt
from typing import TypeVar

import numpy as np

from sparcel.core._checks import checked_flag, checked_number, checked_whole
from sparcel.core.collectives import ALGORITHMS
from sparcel.core.comm import Communicator
from sparcel.core.formats import FewBits
from sparcel.core.formats.indices import INDEX_CODES
from sparcel.core.schemes.density import checked_density
from sparcel.errors import InputError, checked_name
from sparcel.products.linear.batches import MOST_ROWS
from sparcel.products.linear.model import Coordinates
from sparcel.products.linear.parameters import LOSSES, SOLVERS, Parameters, StepSizes
from sparcel.products.linear.ranks import gathered
from sparcel.products.linear.weights import WholeModel
from sparcel.products.rows import Rows
from sparcel.products.rows.rows import Array

T = TypeVar("T")

_PATIENT_EPOCHS, _PATIENT_STEPS = 5, 100
"""Training ends early when so many epochs, and so many steps, lowered the loss too little."""

_BITS = (8, 4)
_BLOCK = 64
"""Values that share a scale. Columns are as different as their frequencies, so a scale for few is
worth its half a bit a value."""

SHARDED = "sharded"
"""The name of what `Sharded` does, beside those of the algorithms of `sparcel.all_reduce`."""


@dataclass(kw_only=True)
class Settings(Parameters):
    """How a model is trained, and what it minimises: the mean ``loss`` of the rows."""

    loss: str = LOSSES[0]

    def __post_init__(self) -> None:
        checked_name(self.loss, LOSSES, "loss")
        checked_name(self.solver, SOLVERS, "solver")
        checked_number(self.l1, "l1", at_least=0)
        checked_number(self.l2, "l2", at_least=0)
        checked_whole(self.epochs, "epochs", at_least=1)
        if self.tol is not None:
            checked_number(self.tol, "tol", at_least=0)
        checked_whole(self.batch_size, "batch_size", at_least=1, at_most=MOST_ROWS)
        StepSizes(self.step, checked_number(self.eta0, "eta0", above=0))
        checked_whole(self.block, "block", at_least=1)
        for name in ("average", "fit_intercept", "asynchronous"):
            checked_flag(getattr(self, name), name)
        if self.solver == "sgd" and self.average and self.l1 > 0:
            raise InputError(
                f"average=True goes with l1=0, got {self.l1}: the average of models is not sparse;"
                " leave one of them out"
            )
        checked_name(self.algorithm, (SHARDED, "auto", *ALGORITHMS), "algorithm")
        checked_name(self.format, INDEX_CODES, "format")
        checked_whole(self.random_state, "random_state", at_least=0)
        if self.solver == "scd":
            self._check_descent()
        if self.density is not None:
            checked_density(self.density)
            self._goes_with("density", "auto", *ALGORITHMS.keys() - {"dense"})
        if self.bits is not None:
            if self.bits not in _BITS:
                raise InputError(f"bits must be 8, 4 or None for all, got {self.bits!r}")
            self._goes_with("bits", SHARDED, "auto", "split_allgather")

    def _check_descent(self) -> None:
        if self.loss == "hinge":
            raise InputError(
                "coordinate descent needs a loss with a derivative everywhere, which 'hinge' is"
                " not; take 'squared_hinge', or solver='sgd'"
            )
        if (self.density, self.bits) != (None, None):
            raise InputError(
                f"density={self.density} and bits={self.bits} go with solver='sgd', got 'scd',"
                " which exchanges without loss; leave them out"
            )

    def _goes_with(self, name: str, *algorithms: str) -> None:
        """Refuse an algorithm that has no use for a setting."""
        if self.algorithm not in algorithms:
            raise InputError(
                f"{name}={getattr(self, name)} goes with algorithm="
                f"{' or '.join(map(repr, sorted(algorithms)))}, got {self.algorithm!r};"
                f" choose one of these, or leave out {name}"
            )

    def rounding(self) -> FewBits | None:
        """Return what rounds the values of gradients; None where they travel as they are."""
        if self.bits is None:
            return None
        return FewBits(self.bits, _BLOCK, "float32", stochastic=True, seed=self.random_state)

    def described(self) -> str:
        """Return a text that is the same for the same settings, in any process."""
        step = getattr(self.step, "__qualname__", self.step)
        if callable(self.step):
            step = f"{step}, at first {self.step(0.0)}"
        return ", ".join(f"{name}={value}" for name, value in {**vars(self), "step": step}.items())


@dataclass(frozen=True, eq=False)
class Examples:
    """A rank's rows, and what a model is fitted to. A rank may have none.

    Attributes
    ----------
    rows
        In the dtype of the model.
    targets
        ``[rows]`` in the same dtype: 1 and -1, numbers of classes, or any numbers.
    weights
        ``[rows]`` in the same dtype, or None where every row counts 1.
    width
        Number of classes that are told from the rest, 1 for two classes and for regression.
    """

    rows: Rows
    targets: Array
    weights: Array | None = None
    width: int = 1


@dataclass(frozen=True)
class Epoch:
    """What one pass over the rows, or over the coordinates, was like.

    Attributes
    ----------
    number
        Epochs so far, this one included.
    loss
        Mean loss of the rows: with SGD, each before the step that used it (progressive
        validation), and with several classes the sum over these; with SCD, at the epoch's end.
    seconds, communication_seconds
        Wall clock on this rank; the time it waited for the other ranks.
    volume
        The larger of the bytes that this rank sent and received.
    """

    number: int
    loss: float
    seconds: float
    communication_seconds: float
    volume: int


def check_alike(
    examples: Examples, settings: Settings, comm: Communicator | None
) -> tuple[float, float, float]:
    """Return what the rows of all ranks have together; all ranks call.

    Returns
    -------
    tuple
        The sum of their weights; where an intercept begins, which is the mean target of a
        regression, and 0 for classes; the root mean square distance of targets from there, above 0,
        and 1 for classes.

    Raises
    ------
    InputError
        On all ranks, when no rank has rows, none has columns or weight, the weight of all is more
        than the dtype holds, or they differ in the shape of their rows or in their settings.
    """
    rows, weights = examples.rows, examples.weights
    dtype = rows.values.dtype
    weight = float(len(rows) if weights is None else weights.sum(dtype=np.float64))
    described = f"{settings.described()}, width={examples.width}"
    moments = _moments(examples, weight) if settings.loss == "squared" else (0.0, 0.0)
    own = [len(rows), weight, *moments, rows.dimensions, str(dtype), described]
    counts, each, means, spreads, widths, dtypes, told = zip(
        *gathered(comm, own, "shape of rows and settings"), strict=True
    )
    if max(counts) == 0:
        raise InputError("there are no rows to fit a model to, on any rank")
    if max(widths) == 0:
        raise InputError("the rows have no columns to fit a model to")
    if sum(each) == 0:
        raise InputError("the weights of all rows are zero; at least one must be positive")
    if not sum(each) <= np.finfo(dtype).max:
        raise InputError(f"the weights of rows add up to more than {dtype} holds; scale them down")
    for name, values in (("dimensions", widths), ("the dtype", dtypes)):
        if len(set(values)) > 1:
            raise InputError(f"ranks must agree in {name} of their rows, got {list(values)}")
    if len(set(told)) > 1:
        raise InputError(
            f"ranks must have the same settings, got {' and '.join(sorted(set(told)))}"
        )
    if settings.loss != "squared":
        return float(sum(each)), 0.0, 1.0
    shares = np.array(each) / sum(each)
    mean = float(shares @ np.array(means)) if settings.fit_intercept else 0.0
    distances = [*np.sqrt(shares) * spreads, *np.sqrt(shares) * (np.array(means) - mean)]
    return float(sum(each)), mean, hypot(*distances) or abs(mean) or 1.0


def _moments(examples: Examples, weight: float) -> tuple[float, float]:
    """Return the mean of this rank's targets, and their root mean square distance from it."""
    if weight == 0:
        return 0.0, 0.0
    targets, weights = examples.targets.astype(np.float64), examples.weights
    mean = float(np.average(targets, weights=weights))
    distances = np.abs(targets - mean)
    peak = float(distances.max()) or 1.0  # squares of the distances themselves might overflow
    return mean, peak * sqrt(np.average((distances / peak) ** 2, weights=weights))


class WaitClock:
    """Adds up how long a rank waits for the others."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, wait: Callable[[], T]) -> T:
        """Return what ``wait`` returns, and count how long it took."""
        start = time.perf_counter()
        result = wait()
        self.seconds += time.perf_counter() - start
        return result


class Trainer(ABC):
    """Trains a model that all ranks share; all of them call each function.

    Parameters
    ----------
    settings
        How to train.
    comm
        The ranks; None for one alone.
    clock
        Counts what this rank waits for others.
    spread
        Of the targets of a regression, whose loss goes with its square; 1 for classes.

    Attributes
    ----------
    clock
        As given.
    steps
        Steps an epoch.
    epochs
        Epochs so far.
    losses
        Mean losses of these epochs.
    """

    steps: int
    _remedy: str
    """What helps when the loss is not finite."""
    _finer = 1.0
    """What ``tol`` is multiplied by."""

    def __init__(
        self, settings: Settings, comm: Communicator | None, clock: WaitClock, spread: float
    ) -> None:
        self._settings, self._comm, self.clock = settings, comm, clock
        self._spread = spread
        self._tol = None if settings.tol is None else settings.tol * self._finer * spread * spread
        self.epochs, self.losses = 0, list[float]()

    def train(
        self,
        after_epoch: Callable[[Epoch], None] = lambda epoch: None,
        after_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Train until the epochs are over, or the loss stops falling by ``tol``."""
        patience = max(_PATIENT_EPOCHS, -(-_PATIENT_STEPS // self.steps))
        while self.epochs < self._settings.epochs and not self._stalls(patience):
            after_epoch(self.epoch(after_step))

    @property
    def still_falls(self) -> bool:
        """Whether all epochs were used and the loss was still falling by more than ``tol``."""
        is_over = self.epochs >= self._settings.epochs
        return self._tol is not None and is_over and not self._stalls(_PATIENT_EPOCHS)

    @property
    def is_worse_than_none(self) -> bool:
        """Whether a regression's loss is over twice that of predicting the mean of the targets."""
        squared = self._settings.loss == "squared"
        return squared and bool(self.losses) and self.losses[-1] > self._spread * self._spread

    def _stalls(self, patience: int) -> bool:
        """Tell whether the last ``patience`` losses are not ``tol`` below the lowest before."""
        losses, tol = self.losses, self._tol
        if tol is None or len(losses) <= patience:
            return False
        return min(losses[-patience:]) > min(losses[:-patience]) - tol

    def epoch(self, after_step: Callable[[int], None] = lambda step: None) -> Epoch:
        """Train for one epoch."""
        start, waited, sent = time.perf_counter(), self.clock.seconds, self._volume
        finish = _nothing
        self._begin_epoch()
        for step in range(self.steps):
            gradient = self._differentiate(step)
            finish()
            finish = self._start(step, gradient)
            if not self._settings.asynchronous:
                finish()
                finish = _nothing
            after_step(step)
        finish()
        loss = self._end_epoch()
        if not np.isfinite(loss):
            raise InputError(f"the loss became {loss} in epoch {self.epochs + 1}: {self._remedy}")
        self.epochs += 1
        self.losses.append(loss)
        seconds, waited = time.perf_counter() - start, self.clock.seconds - waited
        return Epoch(self.epochs, loss, seconds, waited, self._volume - sent)

    @abstractmethod
    def _begin_epoch(self) -> None:
        """Decide what each step of an epoch takes, and read the model for the first."""

    @abstractmethod
    def _differentiate(self, step: int) -> Array:
        """Return what this rank's rows tell for a step; with ``asynchronous``, a step too early."""

    @abstractmethod
    def _start(self, step: int, gradient: Array) -> Callable[[], None]:
        """Begin to sum what the ranks tell; return what waits for the sum and changes the model."""

    @abstractmethod
    def _end_epoch(self) -> float:
        """Return the mean loss of the epoch."""

    @property
    def _volume(self) -> int:
        return 0 if self._comm is None else self._comm.traffic.volume

    @property
    @abstractmethod
    def mean_loss(self) -> float:
        """Mean loss as it is known now, alike on all ranks; NaN before the first step."""

    @abstractmethod
    def fitted(self, everywhere: bool = True) -> tuple[Coordinates, WholeModel | None]:
        """Return the model, and what SGD can go on from; on rank 0 alone unless ``everywhere``."""

    @abstractmethod
    def forget_rows(self) -> None:
        """Give the rows' memory back; the model remains, and no epoch can follow."""

    @abstractmethod
    def state(self) -> dict[str, Array]:
        """Return what `restore` goes on from, bit by bit. What rank 0 gets is complete.

        The next step may change it.
        """

    @abstractmethod
    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from the `state` that rank 0 gives, of a training with the same rows and settings.

        Raises
        ------
        InputError
            When it is of other rows.
        """

    def read(self) -> tuple[Array, Array]:
        """Return the model's coordinates ``[dimensions, width]`` and the intercepts, as copies."""
        coordinates, _ = self.fitted()
        return coordinates.dense(), coordinates.intercepts


def _nothing() -> None:
    """Finish a step that was not begun."""
