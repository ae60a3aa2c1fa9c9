"""What ``sparcel linear fit`` does: files in, a model out."""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from sparcel import _cpu
from sparcel.comm import Communicator, ring_bytes, world
from sparcel.errors import InputError, optional
from sparcel.linear import checkpoint
from sparcel.linear.classes import Classes
from sparcel.linear.model import LinearModel
from sparcel.linear.ranks import gathered, together
from sparcel.linear.reading import read
from sparcel.linear.sgd import Epoch, Sgd
from sparcel.linear.training import Settings, prepare, train
from sparcel.rows import Rows, Source, describe
from sparcel.rows.rows import Array

_MOST_TIMED = 1 << 21
"""The most values of the dense exchange that is timed for comparison; more take proportionally."""


@dataclass(frozen=True)
class Job:
    """What to fit, and where to put what."""

    data: list[Path]
    source: Source
    settings: Settings
    out: Path
    cache: Path | None = None
    checkpoint: Path | None = None
    resume: bool = False
    plot: Path | None = None

    def about(
        self, rows: Rows, targets: Array, classes: Classes | None, comm: Communicator | None
    ) -> str:
        """Describe what a checkpoint must have been made by, to go on from; all ranks call."""
        if self.checkpoint is None:
            return ""
        own = (rows.offsets, rows.columns, rows.values, targets)
        sums = [zlib.crc32(np.ascontiguousarray(array).data) for array in own]
        counts = gathered(comm, [len(rows), rows.nnz, rows.dimensions, sums])
        labels = None if classes is None else classes.labels.tolist()
        settings = {**asdict(self.settings), "epochs": None}
        return json.dumps([describe(self.source), settings, counts, labels])


@dataclass
class Log:
    """What a training was like: its epochs, and the loss against time."""

    epochs: list[Epoch] = field(default_factory=list)
    curve: list[tuple[float, float]] = field(default_factory=list)


def run(job: Job, console: Console) -> None:
    """Fit a model and save it; all ranks that were launched call."""
    comm = world()
    speaks = comm is None or comm.rank == 0
    console.quiet = not speaks
    start = time.perf_counter()
    sgd, classes, about = _prepared(job, comm, console)
    console.print(f"Rows read and arranged in {time.perf_counter() - start:.1f} s")
    _resume(job, about, sgd, comm, console)
    log = _trained(job, about, sgd, console, speaks)
    _cpu.drop_kept()  # what messages of steps took
    whole = sgd.model.whole(everywhere=False)
    if speaks:
        columns, values, intercepts = whole.coordinates()
        labels = None if classes is None else classes.labels
        source = {"source": describe(job.source)}
        LinearModel(
            *(values, intercepts, job.settings.loss, labels, source, columns, whole.dimensions)
        ).save(job.out)
        if job.plot is not None:
            _draw(log, job.plot)
    console.print(f"Model: {job.out}", soft_wrap=True)
    _summarise(log, sgd, whole.dimensions * whole.weights.width, comm, console)


def _prepared(
    job: Job, comm: Communicator | None, console: Console
) -> tuple[Sgd, Classes | None, str]:
    """Read and arrange the rows; what was read goes, once it is arranged."""
    rows = read(job.source, job.data, comm, job.cache)
    classes, targets = _targets(job, rows, comm)
    console.print(_described(rows, classes, comm), soft_wrap=True)
    width = 1 if classes is None else classes.width
    sgd = prepare(rows, targets, None, width, job.settings, comm)
    return sgd, classes, job.about(rows, targets, classes, comm)


def _targets(job: Job, rows: Rows, comm: Communicator | None) -> tuple[Classes | None, Array]:
    """Return the classes, or None for regression, and what to fit each row to."""
    labels = np.zeros(0) if rows.labels is None else rows.labels
    dtype = rows.values.dtype
    if job.settings.loss == "squared":

        def numbers() -> Array:
            try:
                return labels.astype(dtype)
            except ValueError as error:
                raise InputError(f"regression needs labels that are numbers: {error}") from None

        return None, together(comm, numbers)
    together(comm, lambda: _check_classes(labels))
    classes = Classes.of(labels, comm)
    return classes, classes.targets(classes.numbers(labels), dtype)


def _check_classes(labels: Array) -> None:
    """Refuse numbers that are no classes, such as those of a regression."""
    if labels.dtype.kind == "f" and (labels % 1 != 0).any():
        raise InputError(
            f"label {labels[labels % 1 != 0][0]} is no class; for regression give --loss squared"
        )


def _described(rows: Rows, classes: Classes | None, comm: Communicator | None) -> str:
    counts = gathered(comm, [len(rows), rows.nnz])
    total, entries = (sum(column) for column in zip(*counts, strict=True))
    kinds = "" if classes is None else f", {len(classes.labels)} classes"
    ranks = "one process" if comm is None else f"{comm.size} processes over {comm.carrier}"
    return (
        f"Data: {total:,} rows, {rows.dimensions:,} dimensions, {entries / max(total, 1):.1f}"
        f" entries a row{kinds}; {ranks}"
    )


def _resume(job: Job, about: str, sgd: Sgd, comm: Communicator | None, console: Console) -> None:
    """Go on from a checkpoint if that was asked for and rank 0 has one."""
    file = job.checkpoint
    if not job.resume or file is None:
        return

    def own() -> dict[str, Array] | None:
        if (comm is not None and comm.rank) or not file.exists():
            return None
        found, state = checkpoint.read(file, "checkpoint")
        if found["training"] != about:
            raise InputError(
                f"{file} is of a training with other settings, data or number of processes; remove"
                " it, or give the same"
            )
        return state

    state = together(comm, own)
    if any(gathered(comm, state is not None)):
        sgd.restore(state or {})
        console.print(f"Going on after epoch {sgd.epochs}")


def _trained(job: Job, about: str, sgd: Sgd, console: Console, speaks: bool) -> Log:
    """Train, and show how it goes."""
    log, begun = Log(), time.perf_counter()
    console.print("epoch      loss   seconds   waiting      sent")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sgd.steps)

        def after_step(step: int) -> None:
            if job.plot is not None:
                log.curve.append((time.perf_counter() - begun, sgd.mean_loss))
            bar.update(task, completed=step + 1, description=f"loss {sgd.mean_loss:.4f}")

        def after_epoch(epoch: Epoch) -> None:
            log.epochs.append(epoch)
            console.print(
                f"{epoch.number:5d}  {epoch.loss:8.5f}  {epoch.seconds:7.2f} s"
                f" {epoch.communication_seconds:7.2f} s  {epoch.volume / 1e6:6.1f} MB"
            )
            if job.checkpoint is not None:
                state = sgd.state()
                if speaks:
                    checkpoint.write(job.checkpoint, "checkpoint", {"training": about}, state)

        train(sgd, job.settings, after_epoch, after_step)
    return log


def _summarise(
    log: Log, sgd: Sgd, values: int, comm: Communicator | None, console: Console
) -> None:
    """Say what the exchange cost, and what one of dense gradients would have."""
    if comm is None or not log.epochs:
        return
    steps = sgd.steps * len(log.epochs)
    timed = torch.zeros(min(values, _MOST_TIMED))
    start = time.perf_counter()
    comm.run(lambda: comm.all_reduce(timed))
    dense_seconds = (time.perf_counter() - start) * values / len(timed) * steps
    dense_bytes = ring_bytes(4 * values, comm.size) * steps
    sent = sum(epoch.volume for epoch in log.epochs)
    waited = sum(epoch.communication_seconds for epoch in log.epochs)
    console.print(
        f"Exchange: {sent / 1e6:,.1f} MB and {waited:.2f} s on this rank. Dense gradients: "
        f"{dense_bytes / 1e6:,.1f} MB, and {dense_seconds:.2f} s by one exchange timed now "
        f"({dense_seconds / max(waited, 1e-9):.1f} times)",
        soft_wrap=True,
    )


def _draw(log: Log, file: Path) -> None:
    with optional("a plot of the loss", "plots"):
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    ends = np.cumsum([epoch.seconds for epoch in log.epochs])
    axes.plot(*zip(*log.curve, strict=True), linewidth=0.8, label="since the epoch began")
    axes.plot(ends, [epoch.loss for epoch in log.epochs], "o", label="of an epoch")
    axes.set(xlabel="seconds", ylabel="mean loss before each step")
    axes.legend()
    figure.savefig(file)
    pyplot.close(figure)
