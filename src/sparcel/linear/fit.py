"""What ``sparcel linear fit`` does: files in, a model out."""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from sparcel.comm import Communicator, world
from sparcel.errors import InputError
from sparcel.linear import checkpoint
from sparcel.linear.classes import Classes, finite_numbers
from sparcel.linear.fit_report import Log, draw, summarise
from sparcel.linear.model import LinearModel
from sparcel.linear.ranks import gathered, run_or_fail_everywhere
from sparcel.linear.reading import read, read_weights
from sparcel.linear.settings import Settings
from sparcel.linear.trainer import Epoch, Examples, Trainer
from sparcel.linear.training import make_trainer
from sparcel.rows import Rows, Source, describe
from sparcel.rows.rows import Array


@dataclass(frozen=True)
class Task:
    """What to fit, and where to put what."""

    data: list[Path]
    source: Source
    settings: Settings
    out: Path
    weights: Path | None = None
    cache: Path | None = None
    checkpoint: Path | None = None
    resume: bool = False
    plot: Path | None = None


def run(task: Task, console: Console) -> None:
    """Fit a model and save it; all ranks that were launched call."""
    comm = world()
    speaks = comm is None or comm.rank == 0
    console.quiet = not speaks
    start = time.perf_counter()
    trainer, values, labels, about = _prepared(task, comm, console)
    console.print(f"Rows read and arranged in {time.perf_counter() - start:.1f} s")
    _resume(task, about, trainer, comm, console)
    if trainer.epochs >= task.settings.epochs:
        console.print(f"Nothing is left to do: {trainer.epochs} epochs of {task.settings.epochs}")
    log = _trained(task, about, trainer, console, speaks)
    trainer.forget_rows()
    fitted, _ = trainer.fitted(everywhere=False)
    run_or_fail_everywhere(comm, lambda: fitted.check() if speaks else None)
    if speaks:
        source = {"source": describe(task.source)}
        LinearModel(fitted, task.settings.loss, labels, source).save(task.out)
        if task.plot is not None:
            draw(log, task.plot)
    console.print(f"Model: {task.out}", soft_wrap=True)
    if comm is not None and log.epochs:
        told = summarise(log, trainer.steps, task.settings.solver, values, comm)
        console.print(told, soft_wrap=True)


def _prepared(
    task: Task, comm: Communicator | None, console: Console
) -> tuple[Trainer, int, Array | None, str]:
    """Read and arrange the rows; what was read goes, once it is arranged.

    Returns what trains, the number of the model's coordinates, the labels of classes, and what a
    checkpoint must have been made by.
    """
    examples, classes = _examples(task, comm)
    console.print(_described(examples.rows, classes, comm), soft_wrap=True)
    trainer = make_trainer(examples, task.settings, comm)
    about = "" if task.checkpoint is None else _about(task, examples, classes, comm)
    return trainer, examples.rows.dimensions * examples.width, classes, about


def _examples(task: Task, comm: Communicator | None) -> tuple[Examples, Array | None]:
    """Read this rank's rows; return the labels of classes too, or None for regression."""
    rows = read(task.source, task.data, comm, task.cache)
    labels, dtype, weights = rows.labels, rows.values.dtype, None
    assert labels is not None, "sources of trainings have labels"
    if task.weights is not None:
        weights = read_weights(task.weights, rows, task.data, task.cache, comm)
    if task.settings.loss == "squared":
        numbers = run_or_fail_everywhere(comm, lambda: finite_numbers(labels, dtype))
        return Examples(rows, numbers, weights), None
    run_or_fail_everywhere(comm, lambda: _check_classes(labels))
    classes = Classes.of(labels, comm)
    targets = classes.targets(classes.numbers(labels), dtype)
    return Examples(rows, targets, weights, classes.width), classes.labels


def _about(task: Task, examples: Examples, classes: Array | None, comm: Communicator | None) -> str:
    """Describe what a checkpoint must have been made by, to go on from; all ranks call."""
    rows = examples.rows
    own = [rows.offsets, rows.columns, rows.values, examples.targets]
    own += [] if examples.weights is None else [examples.weights]
    sums = [zlib.crc32(np.ascontiguousarray(array).data) for array in own]
    counts = gathered(comm, [len(rows), rows.nnz, rows.dimensions, sums], "checksums")
    settings = {**asdict(task.settings), "epochs": None}
    labels = None if classes is None else classes.tolist()
    return json.dumps([describe(task.source), settings, counts, labels])


def _check_classes(labels: Array) -> None:
    """Refuse numbers that are no classes, such as those of a regression."""
    if labels.dtype.kind == "f" and (labels % 1 != 0).any():
        raise InputError(
            f"label {labels[labels % 1 != 0][0]} is no class; for regression give --loss squared"
        )


def _described(rows: Rows, classes: Array | None, comm: Communicator | None) -> str:
    counts = gathered(comm, [len(rows), rows.nnz], "counts")
    total, entries = (sum(column) for column in zip(*counts, strict=True))
    kinds = "" if classes is None else f", {len(classes)} classes"
    ranks = "one process" if comm is None else f"{comm.size} processes over {comm.carrier}"
    return (
        f"Data: {total:,} rows, {rows.dimensions:,} dimensions, {entries / max(total, 1):.1f}"
        f" entries a row{kinds}; {ranks}"
    )


def _resume(
    task: Task, about: str, trainer: Trainer, comm: Communicator | None, console: Console
) -> None:
    """Go on from a checkpoint if that was asked for and rank 0 has one."""
    file = task.checkpoint
    if not task.resume or file is None:
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

    state = run_or_fail_everywhere(comm, own)
    if any(gathered(comm, state is not None, "who has a checkpoint")):
        trainer.restore(state or {})
        console.print(f"Going on after epoch {trainer.epochs}")


def _trained(task: Task, about: str, trainer: Trainer, console: Console, speaks: bool) -> Log:
    """Train, and show how it goes."""
    log, begun = Log(), time.perf_counter()
    console.print("epoch      loss   seconds   waiting      sent")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("", total=trainer.steps)

        def after_step(step: int) -> None:
            loss = trainer.mean_loss
            if task.plot is not None and task.settings.solver == "sgd":
                log.curve.append((time.perf_counter() - begun, loss))
            bar.update(shown, completed=step + 1, description=f"loss {loss:.4f}")

        def after_epoch(epoch: Epoch) -> None:
            log.epochs.append(epoch)
            console.print(
                f"{epoch.number:5d}  {epoch.loss:8.5f}  {epoch.seconds:7.2f} s"
                f" {epoch.communication_seconds:7.2f} s  {epoch.volume / 1e6:6.1f} MB"
            )
            if task.checkpoint is not None:
                state = trainer.state()
                if speaks:
                    checkpoint.write(task.checkpoint, "checkpoint", {"training": about}, state)

        trainer.train(after_epoch, after_step)
    return log
