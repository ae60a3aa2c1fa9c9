"""What ``sparcel linear fit`` tells of a training: its exchange, and its loss against time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from sparcel.comm import Communicator, ring_bytes
from sparcel.errors import optional
from sparcel.linear.trainer import Epoch

_MOST_TIMED = 1 << 20
"""The most values of the dense exchange that is timed for comparison; more take proportionally."""


@dataclass
class Log:
    """What a training was like: its epochs, and with SGD the loss against time in each."""

    epochs: list[Epoch] = field(default_factory=list)
    curve: list[tuple[float, float]] = field(default_factory=list)


def summarise(log: Log, steps: int, solver: str, values: int, comm: Communicator) -> str:
    """Say what the exchange cost, and what a dense one of ``values`` numbers would have.

    All ranks call. An epoch has so many ``steps``. With SGD a dense exchange sums gradients, with
    SCD each rank sends its part of the model to all others.
    """
    steps *= len(log.epochs)
    own = torch.zeros(min(values, _MOST_TIMED))
    if solver == "sgd":
        what, dense = "gradients", float(ring_bytes(4 * values, comm.size))
        seconds = _timed(lambda: comm.all_reduce(own), comm)
    else:
        what, dense = "models", 4 * values * (comm.size - 1) / comm.size
        part = own[: -(-len(own) // comm.size)].view(torch.uint8)
        seconds = _timed(lambda: comm.gather(part, part.numel()), comm)
    dense_seconds = seconds * values / len(own) * steps
    sent = sum(epoch.volume for epoch in log.epochs)
    waited = sum(epoch.communication_seconds for epoch in log.epochs)
    return (
        f"Exchange: {sent / 1e6:,.1f} MB and {waited:.2f} s on this rank. Dense {what}: "
        f"{dense * steps / 1e6:,.1f} MB, and {dense_seconds:.2f} s by one exchange timed now"
        f" ({dense_seconds / max(waited, 1e-9):.1f} times)"
    )


def _timed(exchange: Callable[[], object], comm: Communicator) -> float:
    start = time.perf_counter()
    comm.run(exchange)
    return time.perf_counter() - start


def draw(log: Log, file: Path) -> None:
    """Draw the loss against time."""
    with optional("a plot of the loss", "plots"):
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    ends = np.cumsum([epoch.seconds for epoch in log.epochs])
    if log.curve:
        axes.plot(*zip(*log.curve, strict=True), linewidth=0.8, label="since the epoch began")
    axes.plot(ends, [epoch.loss for epoch in log.epochs], "o", label="of an epoch")
    axes.set(xlabel="seconds", ylabel="mean loss before each step" if log.curve else "mean loss")
    axes.legend()
    figure.savefig(file)
    pyplot.close(figure)
