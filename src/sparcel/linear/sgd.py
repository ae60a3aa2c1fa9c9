"""Mini-batch stochastic gradient descent on sparse rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sparcel.linear.batches import Batch, most_entries
from sparcel.linear.exchange import Exchange, Pending
from sparcel.linear.step_sizes import StepSizes
from sparcel.linear.weights import Weights
from sparcel.rows.rows import Array
from sparcel.stream import SparseStream


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


class Sgd:
    """Takes steps: all ranks take the same, each with the sum of all ranks' gradients.

    Parameters
    ----------
    weights
        The model, equal on all ranks.
    batches
        This rank's own.
    steps
        Steps an epoch: the most batches of any rank. A rank that has fewer keeps taking part.
    loss
        ``"logistic"``, ``"hinge"``, ``"squared_hinge"`` or ``"squared"``.
    sizes
        Of the steps.
    exchange
        Sums gradients.
    asynchronous
        Whether a step's gradient is computed while that of the step before is summed. Each step but
        an epoch's first then uses a gradient of the model before the step before it.
    seed
        Decides the order of the batches in each epoch.
    """

    def __init__(
        self,
        weights: Weights,
        batches: Sequence[Batch],
        steps: int,
        loss: str,
        sizes: StepSizes,
        exchange: Exchange,
        asynchronous: bool = False,
        seed: int = 0,
    ) -> None:
        self.weights, self.batches, self.steps = weights, batches, steps
        self._loss, self._sizes, self._exchange = loss, sizes, exchange
        self._asynchronous, self._seed = asynchronous, seed
        self.epochs = 0
        shape = (most_entries(batches), weights.width)
        # Two, because one is sent while the next gradient is written.
        self._buffers = [np.empty(shape, weights.dtype) for _ in range(2)]
        self._loss_sum = self._weight_sum = 0.0

    def epoch(self, after_step: Callable[[int], None] = lambda step: None) -> Epoch:
        """Take the steps of one pass over the rows; all ranks call."""
        start = time.perf_counter()
        waited, sent = self._exchange.seconds, self._exchange.volume
        self._loss_sum = self._weight_sum = 0.0
        order = np.random.default_rng([self._seed, self.epochs]).permutation(len(self.batches))
        pending: Pending | None = None
        for step in range(self.steps):
            gradient = self._gradient(order, step)
            if not self._asynchronous:
                self._apply(self._exchange.sum(gradient), step)
            else:
                if pending is not None:
                    self._apply(pending(), step - 1)
                pending = self._exchange.start(gradient)
            after_step(step)
        if pending is not None:
            self._apply(pending(), self.steps - 1)
        self.epochs += 1
        loss = self._loss_sum / self._weight_sum if self._weight_sum else float("nan")
        self._sizes.epoch_ended(loss)
        return Epoch(
            self.epochs,
            loss,
            time.perf_counter() - start,
            self._exchange.seconds - waited,
            self._exchange.volume - sent,
        )

    def _gradient(self, order: Array, step: int) -> SparseStream:
        if step >= len(self.batches):
            return self.weights.no_gradient()
        batch = self.batches[order[step]]
        out = self._buffers[step % 2][: len(batch.columns)]
        return self.weights.gradient(batch, self._loss, out)

    def _apply(self, total: SparseStream, step: int) -> None:
        rate = self._sizes.at(self.epochs + step / self.steps)
        loss, weight = self.weights.step(total, rate)
        self._loss_sum += loss
        self._weight_sum += weight
