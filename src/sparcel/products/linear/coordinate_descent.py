"""Distributed random block coordinate descent on the primal problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from typing_extensions import override

from sparcel import _cpu
from sparcel.core import api
from sparcel.core.collectives.doubling import plain_sum
from sparcel.core.comm import Communicator
from sparcel.core.patterns import cuts
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError
from sparcel.products.linear.batches import threads_for
from sparcel.products.linear.model import Coordinates
from sparcel.products.linear.ranks import broadcast, run_or_fail_everywhere
from sparcel.products.linear.trainer import Examples, Settings, Trainer, WaitClock, check_alike
from sparcel.products.rows import Rows, check
from sparcel.products.rows.rows import Array


@dataclass(frozen=True)
class RowsByColumn:
    """A rank's rows, by the columns that occur on any rank; the coordinates of all others stay 0.

    Coordinate i of the model is that of ``columns[i]``. An intercept is one more coordinate, the
    last, whose column is 1 in each row.

    Attributes
    ----------
    columns
        ``[coordinates]``, without the intercept's; increasing, and equal on all ranks.
    entries
        The rows, their targets and weights. A copy: each entry takes its value and four bytes,
        each coordinate eight bytes.
    size, nnz
        Number of coordinates, and of entries.
    """

    columns: Array
    entries: _cpu.LinearShard
    size: int
    nnz: int


def by_coordinates(
    examples: Examples, fit_intercept: bool, comm: Communicator | None
) -> RowsByColumn:
    """Arrange a rank's rows by columns; all ranks call, and learn which columns occur on any."""
    rows, targets, weights = examples.rows, examples.targets, examples.weights
    ones = len(rows) if fit_intercept else 0
    starts = np.empty(rows.dimensions + 1, np.int64)
    places = np.empty(rows.nnz + ones, np.int32)
    values = np.empty(rows.nnz + ones, rows.values.dtype)
    _cpu.transpose(
        *(rows.offsets, rows.columns, rows.values, starts, places, values),
        threads=torch.get_num_threads(),
    )
    places[rows.nnz :], values[rows.nnz :] = np.arange(ones), 1
    columns = _on_any_rank(np.flatnonzero(np.diff(starts)), rows.dimensions, comm)
    ends = [rows.nnz, rows.nnz + ones] if fit_intercept else [rows.nnz]
    # A column ends where the next one begins that occurs; those between have no entries.
    offsets = np.concatenate([starts[columns], ends])
    entries = _cpu.LinearShard(offsets, places, values, targets, weights, examples.width)
    return RowsByColumn(columns, entries, len(offsets) - 1, len(places))


def _on_any_rank(own: Array, dimensions: int, comm: Communicator | None) -> Array:
    if comm is None:
        return own
    ones = torch.ones(len(own), dtype=torch.int32)
    union = api.all_reduce(SparseStream(torch.from_numpy(own), ones, dimensions), "max", group=comm)
    found = (union.values == 1).nonzero()[:, 0] if union.indices is None else union.indices
    return found.numpy()


def draws(seed: int, epoch: int, slices: Array, steps: int) -> list[Array]:
    """Divide the coordinates into those of each step of an epoch, at random.

    Every coordinate occurs once. Each step takes about as many from each slice of the model. The
    result depends on the arguments alone, so all ranks know it.

    Parameters
    ----------
    slices
        ``[ranks + 1]``, where the slices begin and the last one ends.

    Returns
    -------
    list of ndarray
        For each step its coordinates, increasing.
    """
    random = np.random.default_rng([seed, epoch])
    step = np.concatenate(
        [random.permutation(size) * steps // max(size, 1) for size in np.diff(slices)]
    )
    # numpy sorts narrow integers fastest.
    order = np.argsort(step.astype(np.min_scalar_type(steps - 1)), kind="stable")
    return np.split(order, np.cumsum(np.bincount(step, minlength=steps))[:-1])


_LEAST_STEPS = 16
"""An epoch has so many steps where it can: coordinates that change together take shorter steps."""

_VISIT_NS = 30
"""How long a visit to an entry and its row takes, about: rows are visited in no order."""

_MOST_DIMENSIONS = 2**31 - 1

_NONE = np.empty(0, np.int64)


class Scd(Trainer):
    """Minimises the mean loss + l2 / 2 · |w|₂² + l1 · |w|₁ by steps along some coordinates.

    The coordinates are divided among the ranks, and in each step every rank is responsible for
    ``block`` random ones of its own. All ranks know all P · ``block`` of them from the seed. Each
    takes the derivatives of its rows' losses by them. Every rank gets their sums, from which it
    computes the new values of all of them: nothing else has to be sent. (In SparCML a rank computes
    those of its own alone, and sends all others the ones that changed.)

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
    examples
        This rank's. They are copied, by columns.
    settings
        With a loss that has a derivative everywhere. ``block`` coordinates of each rank change in
        a step.
    comm
        The ranks; None for one alone. All of them call.

    Attributes
    ----------
    columns
        The columns that occur on any rank, increasing.
    values
        ``[coordinates, width]``: of these columns, then the intercept. Equal on all ranks.

    Raises
    ------
    InputError
        On all ranks, when no rank has rows or they differ in shape or settings.

    Source: SparCML, section 8.2; Richtárik and Takáč, "Parallel coordinate descent methods for big
    data optimization" (Mathematical Programming 156, 2016).
    """

    _remedy = "scale the data"
    _finer = 0.1  # its losses are exact, and fall evenly

    def __init__(
        self, examples: Examples, settings: Settings, comm: Communicator | None = None
    ) -> None:
        rows, width = examples.rows, examples.width
        run_or_fail_everywhere(comm, lambda: _check(rows))
        self._weight, mean, spread = check_alike(examples, settings, comm)
        super().__init__(settings, comm, WaitClock(), spread)
        self._dimensions = rows.dimensions
        self._rows = by_coordinates(examples, settings.fit_intercept, comm)
        self.columns = self._rows.columns
        self.values = np.zeros((self._rows.size, width), rows.values.dtype)
        self.values[len(self.columns) :] = mean  # of the intercept, which may be missing
        self._margins = np.zeros((len(rows), width))
        # Rank r owns the coordinates from slices[r] on.
        self.slices = np.array(cuts(self._rows.size, comm.size if comm else 1))
        longest = int(np.diff(self.slices).max())
        block = min(settings.block, max(longest // _LEAST_STEPS, 1))
        self.steps = max(-(-longest // block), 1)

    def _begin_epoch(self) -> None:
        """Draw the steps, which change each coordinate once, the intercept as well."""
        self._read_margins()
        self._drawn = draws(self._settings.random_state, self.epochs, self.slices, self.steps)

    def _end_epoch(self) -> float:
        return self.loss()

    @property
    def mean_loss(self) -> float:
        """Mean loss at the end of the last epoch; NaN before."""
        return self.losses[-1] if self.losses else float("nan")

    def loss(self) -> float:
        """Return the mean loss of all ranks' rows; all ranks call."""
        threads = threads_for(_VISIT_NS * self._margins.size)
        own = self._rows.entries.loss(self._settings.loss, self._margins, threads)
        comm = self._comm
        if comm is not None:
            each = torch.tensor(own, dtype=torch.float64)
            own = self.clock.timed(lambda: comm.run(lambda: plain_sum(each, comm))).item()
        return own / self._weight

    def begin(self, coordinates: Array, intercepts: Array) -> None:
        """Begin with a model: coordinates ``[dimensions, width]``, intercepts ``[width]``."""
        count = len(self.columns)
        self.values[:count] = coordinates[self.columns]
        self.values[count:] = intercepts

    @override  # equal on all ranks
    def fitted(self, everywhere: bool = True) -> tuple[Coordinates, None]:
        count = len(self.columns)
        # Without an intercept there is no last row, and the sum of none is 0.
        intercepts = self.values[count:].sum(axis=0, dtype=np.float64)
        return Coordinates(self.columns, self.values[:count], intercepts, self._dimensions), None

    @override
    def forget_rows(self) -> None:
        del self._rows
        _cpu.drop_kept()  # buffers, also those of messages

    @override  # equal on all ranks
    def state(self) -> dict[str, Array]:
        return {"values": self.values.copy(), "losses": np.array(self.losses)}

    @override
    def restore(self, state: Mapping[str, Array]) -> None:
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

    def _start(self, step: int, gradient: Array) -> Callable[[], None]:
        chosen, comm = self._drawn[step], self._comm
        if comm is None:
            return lambda: self._change(chosen, self._step(chosen, gradient))
        exchange = partial(self._exchange, chosen, gradient, comm)
        late = self._settings.asynchronous
        wait = comm.submit(exchange).wait if late else partial(comm.run, exchange)
        return lambda: self._change(chosen, self.clock.timed(wait))

    def _exchange(self, chosen: Array, sums: Array, comm: Communicator) -> Array:
        """Return new values of the coordinates ``chosen``, inside a job of the communicator."""
        return self._step(chosen, plain_sum(torch.from_numpy(sums), comm).numpy())

    def _read_margins(self) -> None:
        """Compute the margins anew, so that they depend on the model alone and never drift."""
        self._margins.fill(0)
        nonzero = np.flatnonzero(self.values.any(axis=1))
        self._add_to_margins(nonzero, self.values[nonzero].astype(np.float64))

    def _differentiate(self, step: int) -> Array:
        """Return the derivative and the curvature of this rank's losses, ``[chosen, width, 2]``."""
        drawn, late = self._drawn, self._settings.asynchronous
        before = drawn[step - 1] if late and step > 0 else _NONE
        after = drawn[step + 1] if late and step + 1 < self.steps else _NONE
        sums = np.empty((len(drawn[step]), self.values.shape[1], 2))
        self._rows.entries.differentiate(
            *(self._settings.loss, self._margins, drawn[step], before, after, sums),
            threads=self._threads(len(drawn[step])),
        )
        return sums

    def _step(self, chosen: Array, sums: Array) -> Array:
        """Return the least of each coordinate's parabola with its regularisation."""
        slope, curvature = sums[..., 0] / self._weight, sums[..., 1] / self._weight
        old = self.values[chosen].astype(np.float64)
        is_regular = (chosen < len(self.columns))[:, None]  # all but the intercept
        pull = curvature * old - slope
        pull = np.copysign(np.maximum(np.abs(pull) - self._settings.l1 * is_regular, 0), pull)
        steepness = curvature + self._settings.l2 * is_regular
        # Where there is neither a row of any weight nor regularisation, a coordinate stays.
        new = np.divide(pull, steepness, out=old, where=steepness > 0)
        rounded: Array = new.astype(self.values.dtype)
        return rounded

    def _change(self, chosen: Array, new: Array) -> None:
        changes = new.astype(np.float64) - self.values[chosen]
        changed = np.flatnonzero(changes.any(axis=1))
        self.values[chosen] = new
        self._add_to_margins(chosen[changed], changes[changed])

    def _threads(self, coordinates: int) -> int:
        return threads_for(_VISIT_NS * coordinates * self._rows.nnz / max(self._rows.size, 1))

    def _add_to_margins(self, columns: Array, changes: Array) -> None:
        self._rows.entries.change(columns, changes, self._margins, self._threads(len(columns)))


def _check(rows: Rows) -> None:
    check(rows)
    if rows.dimensions > _MOST_DIMENSIONS:
        raise InputError(
            f"coordinate descent takes up to {_MOST_DIMENSIONS} dimensions, got {rows.dimensions};"
            " stochastic gradient descent takes more"
        )
