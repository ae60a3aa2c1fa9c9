"""Mini-batch stochastic gradient descent on sparse rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sparcel import _cpu
from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.linear.coordinates import Coordinates
from sparcel.linear.epoch import Epoch
from sparcel.linear.ranks import gathered
from sparcel.linear.settings import Settings
from sparcel.linear.sgd.batches import TAIL, Batch, most_entries
from sparcel.linear.sgd.replicated import BatchNumbers, BatchView, Pending, Replicated, StepResult
from sparcel.linear.sgd.sharded import Sharded
from sparcel.linear.sgd.step_sizes import StepSizes
from sparcel.linear.sgd.weights import ONCE
from sparcel.linear.sgd.whole import WholeModel
from sparcel.linear.trainer import Trainer
from sparcel.rows.rows import Array


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

    def __init__(
        self,
        model: Replicated | Sharded,
        batches: list[Batch],
        counts: Sequence[int],
        settings: Settings,
        comm: Communicator | None = None,
    ) -> None:
        self.model, self.batches, self._counts, self._comm = model, batches, counts, comm
        self._settings, self._sizes = settings, StepSizes(settings.step, settings.eta0)
        self._rank = 0 if comm is None else comm.rank
        self.steps, self.epochs = max(counts), 0
        self.losses: list[float] = []
        weights = model.weights
        shape = (max(most_entries(batches), TAIL), weights.width)
        # Two, because one is sent while the next gradient is written.
        self._buffers = [np.empty(shape, weights.dtype) for _ in range(2)]
        self._loss_sum = self._weight_sum = 0.0

    def epoch(self, after_step: Callable[[int], None] = lambda step: None) -> Epoch:
        """Take the steps of one pass over the rows."""
        start, waited, sent = time.perf_counter(), self.model.seconds, self._volume
        self._loss_sum = self._weight_sum = 0.0
        numbers = self._numbers()
        later = self._settings.asynchronous
        read = [self.model.read(numbers[step]) for step in range(1 + later)]
        pending: Pending | None = None
        for step in range(self.steps):
            gradient = self._gradient(numbers[step], read.pop(0), step)
            rate = self._sizes.at(self.epochs + step / self.steps)
            if pending is not None:
                read.append(self._count(pending()))
            wanted = numbers[step + 1 + later]
            pending = self.model.start(numbers[step], gradient, rate, wanted, later)
            if not later:
                read.append(self._count(pending()))
                pending = None
            after_step(step)
        if pending is not None:
            self._count(pending())
        loss = self.mean_loss
        if not np.isfinite(loss):
            raise InputError(
                f"the loss became {loss} in epoch {self.epochs + 1}: lower eta0, or scale the data"
            )
        self._sizes.epoch_ended(loss)
        self.epochs += 1
        self.losses.append(loss)
        seconds = time.perf_counter() - start
        waited, sent = self.model.seconds - waited, self._volume - sent
        return Epoch(self.epochs, loss, seconds, waited, sent)

    @property
    def mean_loss(self) -> float:
        """Mean loss of this epoch's rows so far."""
        return self._loss_sum / self._weight_sum if self._weight_sum else float("nan")

    def fitted(self, everywhere: bool = True) -> tuple[Coordinates, WholeModel]:
        """See `Trainer.fitted`."""
        whole = self.model.whole(everywhere)
        return whole.coordinates(), whole

    def forget_rows(self) -> None:
        """See `Trainer.forget_rows`."""
        self.batches.clear()  # the model has the same list
        _cpu.drop_kept()  # also what messages of steps took

    def state(self) -> dict[str, Array]:
        """See `Trainer.state`."""
        return {
            **self.model.state(),
            "progress": np.array([self.epochs, self._sizes.size, self._sizes.last_loss]),
            "losses": np.array(self.losses),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """See `Trainer.restore`."""
        given = {
            name: state[name].tolist() for name in (*ONCE, "progress", "losses") if name in state
        }
        told = gathered(self._comm, given if self._rank == 0 else None, "progress")[0]
        self.model.restore(state)
        self.model.weights.restore({name: np.array(values) for name, values in told.items()})
        epochs, self._sizes.size, self._sizes.last_loss = told["progress"]
        self.epochs, self.losses = int(epochs), told["losses"]

    @property
    def _volume(self) -> int:
        return 0 if self._comm is None else self._comm.traffic.volume

    def _numbers(self) -> list[BatchNumbers]:
        """Return the batches of all ranks in each step of this epoch, and none for two steps more.

        Every rank draws the order of every rank, because owners answer what others need next.
        """
        seed = [self._settings.random_state, self.epochs]
        orders = [np.random.default_rng(seed).permutation(count).tolist() for count in self._counts]
        return [
            [order[step] if step < len(order) else None for order in orders]
            for step in range(self.steps + 2)
        ]

    def _gradient(self, numbers: BatchNumbers, point: BatchView | None, step: int) -> Array:
        """Return the gradient of this rank's batch, with its tail."""
        out, number = self._buffers[step % 2], numbers[self._rank]
        if number is not None and point is not None:
            batch = self.batches[number]
            out = out[: len(batch.columns)]
            batch.gradient(*point, self._settings.loss, out)
        return out

    def _count(self, stepped: StepResult) -> BatchView | None:
        self._loss_sum += float(stepped.tail[2].sum())
        self._weight_sum += float(stepped.tail[1, 0])
        return stepped.point
