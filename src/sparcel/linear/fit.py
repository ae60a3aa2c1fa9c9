"""What ``sparcel linear fit`` does: files in, a model out."""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from sparcel.comm import Communicator, world
from sparcel.errors import InputError
from sparcel.linear import checkpoint
from sparcel.linear.classes import Classes
from sparcel.linear.epoch import Epoch
from sparcel.linear.fit_report import Log, draw, summarise
from sparcel.linear.model import LinearModel
from sparcel.linear.ranks import gathered, together
from sparcel.linear.reading import read
from sparcel.linear.scd import Scd
from sparcel.linear.settings import Settings
from sparcel.linear.sgd import Sgd
from sparcel.linear.training import train, trainer_of
from sparcel.rows import Rows, Source, describe
from sparcel.rows.rows import Array


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
        counts = gathered(comm, [len(rows), rows.nnz, rows.dimensions, sums], "checksums")
        labels = None if classes is None else classes.labels.tolist()
        settings = {**asdict(self.settings), "epochs": None}
        return json.dumps([describe(self.source), settings, counts, labels])


def run(job: Job, console: Console) -> None:
    """Fit a model and save it; all ranks that were launched call."""
    comm = world()
    speaks = comm is None or comm.rank == 0
    console.quiet = not speaks
    start = time.perf_counter()
    trainer, shape, classes, about = _prepared(job, comm, console)
    console.print(f"Rows read and arranged in {time.perf_counter() - start:.1f} s")
    _resume(job, about, trainer, comm, console)
    if trainer.epochs >= job.settings.epochs:
        console.print(f"Nothing is left to do: {trainer.epochs} epochs of {job.settings.epochs}")
    log = _trained(job, about, trainer, console, speaks)
    trainer.forget_rows()
    columns, values, intercepts = trainer.coordinates()
    if speaks:
        labels = None if classes is None else classes.labels
        source = {"source": describe(job.source)}
        LinearModel(
            *(values, intercepts, job.settings.loss, labels, source, columns, shape[0])
        ).save(job.out)
        if job.plot is not None:
            draw(log, job.plot)
    console.print(f"Model: {job.out}", soft_wrap=True)
    if comm is not None and log.epochs:
        told = summarise(log, trainer, prod(shape), comm)
        console.print(told, soft_wrap=True)


def _prepared(
    job: Job, comm: Communicator | None, console: Console
) -> tuple[Sgd | Scd, tuple[int, int], Classes | None, str]:
    """Read and arrange the rows; what was read goes, once it is arranged.

    The model's shape is ``[dimensions, width]``.
    """
    rows = read(job.source, job.data, comm, job.cache)
    classes, targets = _targets(job, rows, comm)
    console.print(_described(rows, classes, comm), soft_wrap=True)
    width = 1 if classes is None else classes.width
    trainer = trainer_of(rows, targets, None, width, job.settings, comm)
    about = job.about(rows, targets, classes, comm)
    return trainer, (rows.dimensions, width), classes, about


def _targets(job: Job, rows: Rows, comm: Communicator | None) -> tuple[Classes | None, Array]:
    """Return the classes, or None for regression, and what to fit each row to."""
    labels, dtype = rows.labels, rows.values.dtype
    assert labels is not None, "sources of trainings have labels"
    if job.settings.loss == "squared":
        return None, together(comm, lambda: _numbers(labels, dtype))
    together(comm, lambda: _check_classes(labels))
    classes = Classes.of(labels, comm)
    return classes, classes.targets(classes.numbers(labels), dtype)


def _numbers(labels: Array, dtype: Any) -> Array:
    """Return labels as finite numbers."""
    try:
        found = labels.astype(dtype)
    except ValueError as error:
        raise InputError(f"regression needs labels that are numbers: {error}") from None
    if not np.isfinite(found).all():
        wrong = labels[~np.isfinite(found)][0]
        raise InputError(f"regression needs labels that are finite in {dtype}, got {wrong!s}")
    return found


def _check_classes(labels: Array) -> None:
    """Refuse numbers that are no classes, such as those of a regression."""
    if labels.dtype.kind == "f" and (labels % 1 != 0).any():
        raise InputError(
            f"label {labels[labels % 1 != 0][0]} is no class; for regression give --loss squared"
        )


def _described(rows: Rows, classes: Classes | None, comm: Communicator | None) -> str:
    counts = gathered(comm, [len(rows), rows.nnz], "counts")
    total, entries = (sum(column) for column in zip(*counts, strict=True))
    kinds = "" if classes is None else f", {len(classes.labels)} classes"
    ranks = "one process" if comm is None else f"{comm.size} processes over {comm.carrier}"
    return (
        f"Data: {total:,} rows, {rows.dimensions:,} dimensions, {entries / max(total, 1):.1f}"
        f" entries a row{kinds}; {ranks}"
    )


def _resume(
    job: Job, about: str, trainer: Sgd | Scd, comm: Communicator | None, console: Console
) -> None:
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
    if any(gathered(comm, state is not None, "who has a checkpoint")):
        trainer.restore(state or {})
        console.print(f"Going on after epoch {trainer.epochs}")


def _trained(job: Job, about: str, trainer: Sgd | Scd, console: Console, speaks: bool) -> Log:
    """Train, and show how it goes."""
    log, begun = Log(), time.perf_counter()
    console.print("epoch      loss   seconds   waiting      sent")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=trainer.steps)

        def after_step(step: int) -> None:
            loss = trainer.mean_loss
            if job.plot is not None and isinstance(trainer, Sgd):
                log.curve.append((time.perf_counter() - begun, loss))
            bar.update(task, completed=step + 1, description=f"loss {loss:.4f}")

        def after_epoch(epoch: Epoch) -> None:
            log.epochs.append(epoch)
            console.print(
                f"{epoch.number:5d}  {epoch.loss:8.5f}  {epoch.seconds:7.2f} s"
                f" {epoch.communication_seconds:7.2f} s  {epoch.volume / 1e6:6.1f} MB"
            )
            if job.checkpoint is not None:
                state = trainer.state()
                if speaks:
                    checkpoint.write(job.checkpoint, "checkpoint", {"training": about}, state)

        train(trainer, job.settings, after_epoch, after_step)
    return log
