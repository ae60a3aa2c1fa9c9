"""Distributed random block coordinate descent on the primal problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from sparcel import _cpu
from sparcel._checks import whole_number
from sparcel.comm import Communicator
from sparcel.errors import InputError, known
from sparcel.linear.epoch import Epoch
from sparcel.linear.ranks import broadcast, check_alike, together
from sparcel.linear.scd.coordinates import by_coordinates, draws
from sparcel.linear.scd.updates import GATHERS
from sparcel.linear.threads import threads_for
from sparcel.rows import Rows, check
from sparcel.rows.rows import Array

_LOSSES = ("logistic", "squared_hinge", "squared")

_LEAST_STEPS = 16
"""An epoch has so many steps where it can: coordinates that change together take shorter steps."""

_VISIT_NS = 30
"""How long a visit to an entry and its row takes, about: rows are visited in no order."""

_MOST_DIMENSIONS = 2**31 - 1

_NONE = np.empty(0, np.int64)


class Scd:
    """Minimises the mean loss + l2 / 2 · |w|₂² + l1 · |w|₁ by steps along some coordinates.

    The coordinates are divided among the ranks, and in each step every rank is responsible for
    ``block`` random ones of its own. All ranks know all P · ``block`` of them from the seed. Each
    takes the derivatives of its rows' losses by them. Every rank gets their sums, from which it
    computes the new values of all of them: nothing else has to be sent.

    With several classes, each is told from the rest; a chosen coordinate changes in all classes, so
    that one exchange serves them all.

    A coordinate moves to the least of a parabola plus its regularisation. The parabolas of all
    coordinates together lie nowhere below the objective, which therefore never rises, but for
    rounding. Where n chosen coordinates meet in a row, (∑ xⱼhⱼ)² ≤ n · ∑ (xⱼhⱼ)², so the row's
    curvature counts n times. Richtárik and Takáč take a bound for all rows and on average over all
    draws, 1 + (ω − 1)(τ − 1) / (m − 1), with the ω entries of the longest row, τ chosen ones and m
    coordinates; here the draw is known, and few rows of high-dimensional data have n > 1.

    With ``asynchronous``, derivatives do not know of the step before. As |φ'(z + d) − φ'(z)| ≤
    L|d|, with L the largest curvature of a loss φ, this costs a row that both steps meet at most
    L/2 · (d² + d'²) for its changes d and d'. So such a row counts with L, and once more for the
    step before and for the step after. What never rises then is the objective plus L/2 · d² for
    the rows that the last and the next step both meet.

    Parameters
    ----------
    rows, targets, row_weights
        This rank's, as for `sparcel.linear.sgd.batches.arrange`. A rank may have none. They are
        copied, by columns.
    loss
        ``"logistic"``, ``"squared_hinge"`` or ``"squared"``.
    block
        The most coordinates of each rank that change in a step.
    gather
        ``"nothing"``; or ``"sparse"``, with which each rank computes only the values of its own
        coordinates, and sends the others those that changed, as SparCML does. The bits are the
        same.
    comm
        The ranks; None for one alone. All of them call.
    seed
        Decides which coordinates change in which step.
    asynchronous
        Whether derivatives are taken while those of the step before are exchanged.
    width
        Number of classes that are told from the rest, 1 for two classes and for regression.

    Attributes
    ----------
    columns
        The columns that occur on any rank, increasing.
    values
        ``[coordinates, width]``: of these columns, then the intercept. Equal on all ranks.
    updates
        The exchange with the other ranks.
    steps
        Steps an epoch, in which each coordinate changes once, the intercept as well.
    epochs
        How many are done.
    losses
        Mean losses at the ends of the epochs so far; with several classes, the sums over these.

    Raises
    ------
    InputError
        For an unknown setting; on all ranks, when no rank has rows or they differ in shape.

    Source: SparCML, section 8.2; Richtárik and Takáč, "Parallel coordinate descent methods for big
    data optimization" (Mathematical Programming 156, 2016).
    """

    def __init__(
        self,
        rows: Rows,
        targets: Array,
        row_weights: Array | None = None,
        loss: str = "logistic",
        l1: float = 0.0,
        l2: float = 1e-6,
        block: int = 100,
        gather: str = "nothing",
        comm: Communicator | None = None,
        seed: int = 0,
        asynchronous: bool = False,
        fit_intercept: bool = True,
        width: int = 1,
    ) -> None:
        if loss == "hinge":
            raise InputError(
                "coordinate descent needs a loss with a derivative everywhere, which 'hinge' is"
                " not; take 'squared_hinge', or stochastic gradient descent"
            )
        self._loss, self._l1, self._l2 = known(loss, _LOSSES, "loss"), l1, l2
        updates = GATHERS[known(gather, GATHERS, "gather")]
        block = whole_number(block, "block", at_least=1)
        together(comm, lambda: _check(rows, targets))
        own = len(rows) if row_weights is None else row_weights.sum(dtype=np.float64)
        told = f"{loss}, l1={l1}, l2={l2}, block={block}, gather={gather}, seed={seed}"
        self._weight = check_alike(
            *(comm, len(rows), float(own), rows.dimensions, rows.values.dtype),
            f"{told}, {asynchronous=}, {fit_intercept=}, {width=}",
        )
        self._dimensions, self._seed, self._asynchronous = rows.dimensions, seed, asynchronous
        self._shard = by_coordinates(rows, targets, row_weights, width, fit_intercept, comm)
        self.columns = self._shard.columns
        self.values = np.zeros((self._shard.size, width), rows.values.dtype)
        self._margins = np.zeros((len(rows), width))
        self.updates, self._comm = updates(comm, self._shard.size), comm
        longest = int(np.diff(self.updates.slices).max())
        self.steps = max(-(-longest // min(block, max(longest // _LEAST_STEPS, 1))), 1)
        self.epochs = 0
        self.losses: list[float] = []

    def epoch(self, after_step: Callable[[int], None] = lambda step: None) -> Epoch:
        """Change each coordinate once; all ranks call. The epoch's loss is that at its end."""
        start = time.perf_counter()
        waited, sent = self.waited, self.updates.volume
        self._read_margins()
        drawn = draws(self._seed, self.epochs, self.updates.slices, self.steps)
        pending: Callable[[], Array] | None = None
        for step, chosen in enumerate(drawn):
            sums = self._differentiate(drawn, step)
            if not self._asynchronous:
                self._change(chosen, self.updates.make(chosen, sums, self.values, self._step))
            else:
                if pending is not None:
                    self._change(drawn[step - 1], pending())
                pending = self.updates.start(chosen, sums, self.values, self._step)
            after_step(step)
        if pending is not None:
            self._change(drawn[-1], pending())
        self.epochs += 1
        loss = self.loss()
        self.losses.append(loss)
        return Epoch(
            self.epochs,
            loss,
            time.perf_counter() - start,
            self.waited - waited,
            self.updates.volume - sent,
        )

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for others."""
        return self.updates.seconds

    @property
    def mean_loss(self) -> float:
        """Mean loss at the end of the last epoch; NaN before."""
        return self.losses[-1] if self.losses else float("nan")

    def loss(self) -> float:
        """Return the mean loss of all ranks' rows; all ranks call."""
        own = self._shard.entries.loss(
            self._loss, self._margins, threads_for(_VISIT_NS * self._margins.size)
        )
        return self.updates.total(own) / self._weight

    def objective(self) -> float:
        """Return what is minimised; all ranks call."""
        coordinates = self.values[: len(self.columns)].astype(np.float64)
        penalty = self._l2 / 2 * (coordinates**2).sum() + self._l1 * np.abs(coordinates).sum()
        return self.loss() + float(penalty)

    def read(self) -> tuple[Array, Array]:
        """Return the coordinates ``[dimensions, width]`` and the intercepts, as copies."""
        columns, values, intercepts = self.coordinates()
        out = np.zeros((self._dimensions, values.shape[1]), values.dtype)
        out[columns] = values
        return out, intercepts

    def coordinates(self) -> tuple[Array, Array, Array]:
        """Return the columns that occur, increasing, their coordinates, and the intercepts."""
        count = len(self.columns)
        # Without an intercept there is no last row, and the sum of none is 0.
        intercepts = self.values[count:].sum(axis=0, dtype=np.float64)
        return self.columns, self.values[:count], intercepts

    def forget_rows(self) -> None:
        """Give the rows' memory back; the model remains, and no epoch can follow."""
        del self._shard
        _cpu.drop_kept()  # also what messages of steps took

    def state(self) -> dict[str, Array]:
        """Return what `restore` goes on from, between two epochs; equal on all ranks."""
        return {"values": self.values.copy(), "losses": np.array(self.losses)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from the `state` that rank 0 gives, bit for bit; all ranks call.

        Raises
        ------
        InputError
            When it is of other rows.
        """
        state = {name: broadcast(state.get(name), self._comm) for name in ("values", "losses")}
        state["values"] = state["values"].reshape(-1, self.values.shape[1])
        if state["values"].shape != self.values.shape:
            raise InputError(
                f"the state has {len(state['values'])} coordinates, and these rows have"
                f" {len(self.values)}; load the state of a training on the same rows"
            )
        self.values[:], self.losses = state["values"], state["losses"].tolist()
        self.epochs = len(self.losses)
        self._read_margins()

    def _read_margins(self) -> None:
        """Compute the margins anew, so that they depend on the model alone and never drift."""
        self._margins.fill(0)
        nonzero = np.flatnonzero(self.values.any(axis=1))
        self._add_to_margins(nonzero, self.values[nonzero].astype(np.float64))

    def _differentiate(self, drawn: list[Array], step: int) -> Array:
        """Return the derivative and the curvature of this rank's losses, ``[chosen, width, 2]``."""
        before = drawn[step - 1] if self._asynchronous and step > 0 else _NONE
        after = drawn[step + 1] if self._asynchronous and step + 1 < self.steps else _NONE
        sums = np.empty((len(drawn[step]), self.values.shape[1], 2))
        self._shard.entries.differentiate(
            *(self._loss, self._margins, drawn[step], before, after, sums),
            threads=self._threads(len(drawn[step])),
        )
        return sums

    def _step(self, chosen: Array, sums: Array) -> Array:
        """Return the least of each coordinate's parabola with its regularisation."""
        slope, curvature = sums[..., 0] / self._weight, sums[..., 1] / self._weight
        old = self.values[chosen].astype(np.float64)
        is_regular = (chosen < len(self.columns))[:, None]  # all but the intercept
        pull = curvature * old - slope
        pull = np.copysign(np.maximum(np.abs(pull) - self._l1 * is_regular, 0), pull)
        steepness = curvature + self._l2 * is_regular
        # Without rows of any weight nor regularisation, nothing pulls.
        new = np.divide(pull, steepness, out=old, where=steepness > 0)
        rounded: Array = new.astype(self.values.dtype)
        rounded += 0  # makes -0 a 0, since a sparse stream leaves unchanged zeros out
        return rounded

    def _change(self, chosen: Array, new: Array) -> None:
        changes = new.astype(np.float64) - self.values[chosen]
        changed = np.flatnonzero(changes.any(axis=1))
        self.values[chosen] = new
        self._add_to_margins(chosen[changed], changes[changed])

    def _threads(self, coordinates: int) -> int:
        return threads_for(_VISIT_NS * coordinates * self._shard.nnz / max(self._shard.size, 1))

    def _add_to_margins(self, columns: Array, changes: Array) -> None:
        self._shard.entries.change(columns, changes, self._margins, self._threads(len(columns)))


def _check(rows: Rows, targets: Array) -> None:
    check(rows)
    if len(rows) != len(targets):
        raise InputError(f"{len(rows)} rows need as many targets, got {len(targets)}")
    if rows.dimensions > _MOST_DIMENSIONS:
        raise InputError(
            f"coordinate descent takes up to {_MOST_DIMENSIONS} dimensions, got {rows.dimensions};"
            " stochastic gradient descent takes more"
        )
