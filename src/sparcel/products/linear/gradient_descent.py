"""Mini-batch stochastic gradient descent on sparse rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from sparcel import _cpu
from sparcel.core.comm import Communicator
from sparcel.core.schemes.density import count_for
from sparcel.errors import InputError
from sparcel.products.linear.batches import (
    TAIL,
    Batch,
    Numbering,
    arrange,
    by_frequency,
    most_entries,
)
from sparcel.products.linear.model import Coordinates
from sparcel.products.linear.parameters import StepSizes
from sparcel.products.linear.ranks import gathered, run_or_fail_everywhere
from sparcel.products.linear.replicated import BatchNumbers, Exchange, Replicated
from sparcel.products.linear.sharded import Sharded
from sparcel.products.linear.trainer import SHARDED, Examples, Settings, Trainer, check_alike
from sparcel.products.linear.weights import ONCE, Weights, WholeModel
from sparcel.products.rows import check
from sparcel.products.rows.rows import Array


def prepare(
    examples: Examples,
    settings: Settings,
    comm: Communicator | None = None,
    weights: Weights | None = None,
) -> Sgd:
    """Arrange a rank's rows for SGD and agree with the others on what they share.

    Parameters
    ----------
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
    rows, width = examples.rows, examples.width

    def arranged() -> tuple[Numbering | None, list[Batch]]:
        check(rows)
        numbering = by_frequency(rows) if comm is None and weights is None else None
        seed = [settings.random_state, 0 if comm is None else comm.rank]
        order = np.random.default_rng(seed).permutation(len(rows))
        size, given = settings.batch_size, (rows, examples.targets, examples.weights)
        return numbering, arrange(*given, size, order, numbering)

    numbering, batches = run_or_fail_everywhere(comm, arranged)
    if weights is None:
        _cpu.drop_kept()  # buffers of reading and arranging, which a single pass would need again
    _, mean, spread = check_alike(examples, settings, comm)
    told = gathered(comm, [len(batches), most_entries(batches)], "batches")
    counts, entries = zip(*told, strict=True)
    empty, dimensions = new_weights(settings, width, rows.values.dtype), rows.dimensions
    model: Replicated | Sharded
    if settings.algorithm == SHARDED and comm is not None and weights is None:
        model = Sharded(empty, dimensions, batches, comm, settings.rounding())
    else:
        exchange = _exchange(settings, width, dimensions, max(entries), comm)
        columns = None if numbering is None else numbering.columns
        whole = weights or empty.sized(dimensions if columns is None else len(columns))
        model = Replicated(WholeModel(whole, columns, dimensions), batches, comm, exchange)
    model.weights.begin(mean, spread)
    return Sgd(model, batches, counts, settings, comm)


def new_weights(settings: Settings, width: int, dtype: Any) -> Weights:
    """Return a model to train that has no columns yet; see `Weights.sized`."""
    adaptive, average = settings.step == "adagrad", settings.average
    l1, l2, intercept = settings.l1, settings.l2, settings.fit_intercept
    return Weights(0, width, l1, l2, adaptive, average, dtype, intercept)


def _exchange(
    settings: Settings, width: int, dimensions: int, entries: int, comm: Communicator | None
) -> Exchange:
    """Return how ranks sum gradients that have so many entries at most."""
    sent, rounding = None, None if comm is None else settings.rounding()
    if comm is not None and settings.density is not None:
        sent = count_for(settings.density, dimensions)
        entries = min(entries, sent + TAIL)
    if rounding is not None and width > 1:
        raise InputError(
            f"bits={settings.bits} goes with one class that is told from the rest where"
            f" gradients are summed on all ranks, got {width} classes; leave out bits, or call"
            " fit with algorithm='sharded'"
        )
    algorithm = "auto" if settings.algorithm == SHARDED else settings.algorithm
    return Exchange(algorithm, settings.format, entries, sent, rounding)


class Sgd(Trainer):
    """Takes steps, each with the sum of all ranks' gradients.

    Parameters
    ----------
    model
        Where the coordinates are, and how they are changed.
    batches
        This rank's own.
    counts
        How many batches each rank has. An epoch has as many steps as the most; a rank that has
        fewer keeps taking part.
    settings
        With ``asynchronous``, a gradient is computed while the step before is under way. It is then
        one of the model before that step, except in an epoch's first step.
    comm
        The ranks; None for one alone.

    Attributes
    ----------
    model, batches
        As given.
    """

    _remedy = "lower eta0, or scale the data"

    def __init__(
        self,
        model: Replicated | Sharded,
        batches: list[Batch],
        counts: Sequence[int],
        settings: Settings,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(settings, comm, model.clock, model.weights.spread)
        self.model, self.batches, self._counts = model, batches, counts
        self._sizes = StepSizes(settings.step, settings.eta0)
        self._rank = 0 if comm is None else comm.rank
        self.steps = max(counts)
        weights = model.weights
        shape = (max(most_entries(batches), TAIL), weights.width)
        # Two, because one is sent while the next gradient is written.
        self._buffers = [np.empty(shape, weights.dtype) for _ in range(2)]
        self._loss_sum = self._weight_sum = 0.0

    def _begin_epoch(self) -> None:
        self._loss_sum = self._weight_sum = 0.0
        self._numbers = self._draw()
        begin = self._numbers[: 1 + self._settings.asynchronous]
        self._views = deque(self.model.read(numbers) for numbers in begin)

    def _differentiate(self, step: int) -> Array:
        """Return the gradient of this rank's batch, with its tail."""
        view, number = self._views.popleft(), self._numbers[step][self._rank]
        out = self._buffers[step % 2]
        if number is not None and view is not None:
            batch = self.batches[number]
            out = out[: len(batch.columns)]
            batch.gradient(*view, self._settings.loss, out)
        return out

    def _start(self, step: int, gradient: Array) -> Callable[[], None]:
        rate, later = self._sizes.at(self.epochs + step / self.steps), self._settings.asynchronous
        if self._sizes.adaptive:  # other steps go with the gradient, and so with the targets
            rate *= self.model.weights.spread
        numbers, wanted = self._numbers[step], self._numbers[step + 1 + later]
        wait = self.model.start(numbers, gradient, rate, wanted, later)

        def finish() -> None:
            tail, view = wait()
            self._loss_sum += float(tail[2].sum())
            self._weight_sum += float(tail[1, 0])
            self._views.append(view)

        return finish

    def _end_epoch(self) -> float:
        self._sizes.epoch_ended(self.mean_loss)
        return self.mean_loss

    @property
    def mean_loss(self) -> float:
        """Mean loss of this epoch's rows so far."""
        return self._loss_sum / self._weight_sum if self._weight_sum else float("nan")

    @override
    def fitted(self, everywhere: bool = True) -> tuple[Coordinates, WholeModel]:
        whole = self.model.whole(everywhere)
        return whole.coordinates(), whole

    @override
    def forget_rows(self) -> None:
        self.batches.clear()  # the model has the same list
        _cpu.drop_kept()  # buffers, also those of messages

    @override
    def state(self) -> dict[str, Array]:
        return {
            **self.model.state(),
            "progress": np.array([self.epochs, self._sizes.size, self._sizes.last_loss]),
            "losses": np.array(self.losses),
        }

    @override
    def restore(self, state: Mapping[str, Array]) -> None:
        given = {
            name: state[name].tolist() for name in (*ONCE, "progress", "losses") if name in state
        }
        told = gathered(self._comm, given if self._rank == 0 else None, "progress")[0]
        self.model.restore(state)
        self.model.weights.restore({name: np.array(values) for name, values in told.items()})
        epochs, self._sizes.size, self._sizes.last_loss = told["progress"]
        self.epochs, self.losses = int(epochs), told["losses"]

    def _draw(self) -> list[BatchNumbers]:
        """Return the batches of all ranks in each step of this epoch, and none for two steps more.

        Every rank draws the order of every rank, because owners answer what others need next.
        """
        seed = [self._settings.random_state, self.epochs]
        orders = [np.random.default_rng(seed).permutation(count).tolist() for count in self._counts]
        return [
            [order[step] if step < len(order) else None for order in orders]
            for step in range(self.steps + 2)
        ]
