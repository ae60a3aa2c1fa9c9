"""What ``sparcel linear fit`` does: files in, a model out."""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from sparcel.core.comm import Communicator, ring_bytes, world
from sparcel.errors import InputError, optional
from sparcel.products.linear.coordinate_descent import Scd
from sparcel.products.linear.gradient_descent import prepare
from sparcel.products.linear.inputs import Classes, finite_numbers, read, read_weights
from sparcel.products.linear.model import LinearModel, read_arrays, write_arrays
from sparcel.products.linear.ranks import gathered, run_or_fail_everywhere
from sparcel.products.linear.trainer import Epoch, Examples, Settings, Trainer
from sparcel.products.rows import Rows, Source, describe
from sparcel.products.rows.rows import Array

_STATE = 2
"""The number of what the arrays of a checkpoint are; another one makes older ones unfit."""


@dataclass
class Fit:
    """What to fit, and where to put what; all ranks that were launched call each function."""

    data: list[Path]
    source: Source
    settings: Settings
    out: Path
    weights: Path | None = None
    cache: Path | None = None
    checkpoint: Path | None = None
    resume: bool = False
    plot: Path | None = None
    console: Console = field(default_factory=lambda: Console(highlight=False))
    comm: Communicator | None = field(default_factory=world)

    def run(self) -> None:
        """Fit a model and save it."""
        speaks = self.comm is None or self.comm.rank == 0
        self.console.quiet = not speaks
        start = time.perf_counter()
        trainer, values, labels, about = self._prepared()
        self.console.print(f"Rows read and arranged in {time.perf_counter() - start:.1f} s")
        if self.resume and self.checkpoint is not None:
            self._resume(self.checkpoint, about, trainer)
        epochs, curve = self._trained(about, trainer, speaks)
        trainer.forget_rows()
        fitted, _ = trainer.fitted(everywhere=False)
        run_or_fail_everywhere(self.comm, lambda: fitted.check() if speaks else None)
        if speaks:
            source = {"source": describe(self.source)}
            LinearModel(fitted, self.settings.loss, labels, source).save(self.out)
            if self.plot is not None:
                _draw(epochs, curve, self.plot)
        self.console.print(f"Model: {self.out}", soft_wrap=True)
        if self.comm is not None and epochs:
            told = self._exchanged(epochs, trainer.steps, values, self.comm.size)
            self.console.print(told, soft_wrap=True)

    def _prepared(self) -> tuple[Trainer, int, Array | None, str]:
        """Read and arrange the rows; what was read goes, once it is arranged.

        Returns what trains, the number of the model's coordinates, the labels of classes, and what
        a checkpoint must have been made by.
        """
        examples, classes = self._examples()
        self.console.print(self._described(examples.rows, classes), soft_wrap=True)
        make = Scd if self.settings.solver == "scd" else prepare
        trainer = make(examples, self.settings, self.comm)
        about = "" if self.checkpoint is None else self._about(examples, classes)
        return trainer, examples.rows.dimensions * examples.width, classes, about

    def _examples(self) -> tuple[Examples, Array | None]:
        """Read this rank's rows; return the labels of classes too, or None for regression."""
        comm = self.comm
        rows = read(self.source, self.data, comm, self.cache)
        labels, dtype, weights = rows.labels, rows.values.dtype, None
        assert labels is not None, "sources of trainings have labels"
        if self.weights is not None:
            weights = read_weights(self.weights, rows, self.data, self.cache, comm)
        if self.settings.loss == "squared":
            numbers = run_or_fail_everywhere(comm, lambda: finite_numbers(labels, dtype))
            return Examples(rows, numbers, weights), None
        run_or_fail_everywhere(comm, lambda: _check_classes(labels))
        classes = Classes.of(labels, comm)
        targets = classes.targets(classes.numbers(labels), dtype)
        return Examples(rows, targets, weights, classes.width), classes.labels

    def _described(self, rows: Rows, classes: Array | None) -> str:
        comm, counts = self.comm, gathered(self.comm, [len(rows), rows.nnz], "counts")
        total, entries = np.sum(counts, axis=0).tolist()
        kinds = "" if classes is None else f", {len(classes)} classes"
        ranks = "one process" if comm is None else f"{comm.size} processes over {comm.carrier}"
        return (
            f"Data: {total:,} rows, {rows.dimensions:,} dimensions, {entries / max(total, 1):.1f}"
            f" entries a row{kinds}; {ranks}"
        )

    def _about(self, examples: Examples, classes: Array | None) -> str:
        """Describe what a checkpoint must have been made by, to go on from."""
        rows = examples.rows
        own = [rows.offsets, rows.columns, rows.values, examples.targets]
        own += [] if examples.weights is None else [examples.weights]
        sums = [zlib.crc32(np.ascontiguousarray(array).data) for array in own]
        counts = gathered(self.comm, [len(rows), rows.nnz, rows.dimensions, sums], "checksums")
        settings = {**asdict(self.settings), "epochs": None}
        labels = None if classes is None else classes.tolist()
        return json.dumps([_STATE, describe(self.source), settings, counts, labels])

    def _resume(self, file: Path, about: str, trainer: Trainer) -> None:
        """Go on from a checkpoint if rank 0 has one."""

        def own() -> dict[str, Array] | None:
            if (self.comm is not None and self.comm.rank) or not file.exists():
                return None
            found, state = read_arrays(file, "checkpoint")
            if found["training"] != about:
                raise InputError(
                    f"{file} is of a training with other settings, data or number of processes;"
                    " remove it, or give the same"
                )
            return state

        state = run_or_fail_everywhere(self.comm, own)
        if any(gathered(self.comm, state is not None, "who has a checkpoint")):
            trainer.restore(state or {})
            self.console.print(f"Going on after epoch {trainer.epochs}")

    def _trained(
        self, about: str, trainer: Trainer, speaks: bool
    ) -> tuple[list[Epoch], list[tuple[float, float]]]:
        """Train, and show how it goes; return the epochs, and with SGD losses against time."""
        has_curve = self.plot is not None and self.settings.solver == "sgd"
        epochs, curve, begun = list[Epoch](), list[tuple[float, float]](), time.perf_counter()
        if trainer.epochs >= self.settings.epochs:
            self.console.print(
                f"Nothing is left to do: {trainer.epochs} epochs of {self.settings.epochs}"
            )
        self.console.print("epoch      loss   seconds   waiting      sent")
        is_shown = self.console.is_terminal
        with Progress(console=self.console, transient=True, disable=not is_shown) as bar:
            shown = bar.add_task("", total=trainer.steps)

            def after_step(step: int) -> None:
                if has_curve:
                    curve.append((time.perf_counter() - begun, trainer.mean_loss))
                bar.update(shown, completed=step + 1, description=f"loss {trainer.mean_loss:.4f}")

            def after_epoch(epoch: Epoch) -> None:
                epochs.append(epoch)
                self.console.print(
                    f"{epoch.number:5d}  {epoch.loss:8.5f}  {epoch.seconds:7.2f} s"
                    f" {epoch.communication_seconds:7.2f} s  {epoch.volume / 1e6:6.1f} MB"
                )
                if self.checkpoint is not None:
                    state = trainer.state()
                    if speaks:
                        write_arrays(self.checkpoint, "checkpoint", {"training": about}, state)

            trainer.train(after_epoch, after_step)
        return epochs, curve

    def _exchanged(self, epochs: list[Epoch], steps: int, values: int, ranks: int) -> str:
        """Say what the exchange of so many ``steps`` an epoch cost, beside that of all values.

        With SGD a dense exchange sums gradients, with SCD each rank sends its part of the model.
        """
        sent = sum(epoch.volume for epoch in epochs)
        waited = sum(epoch.communication_seconds for epoch in epochs)
        by_sgd = self.settings.solver == "sgd"
        dense = ring_bytes(4 * values, ranks) if by_sgd else 4 * values * (ranks - 1) / ranks
        return (
            f"Exchange: {sent / 1e6:,.1f} MB and {waited:.2f} s on this rank. Dense"
            f" {'gradients' if by_sgd else 'models'}: {dense * steps * len(epochs) / 1e6:,.1f} MB"
        )


def _check_classes(labels: Array) -> None:
    """Refuse numbers that are no classes, such as those of a regression."""
    if labels.dtype.kind == "f" and (labels % 1 != 0).any():
        raise InputError(
            f"label {labels[labels % 1 != 0][0]} is no class; for regression give --loss squared"
        )


def _draw(epochs: list[Epoch], curve: list[tuple[float, float]], file: Path) -> None:
    """Draw the loss against time: of each epoch, and in between."""
    with optional("a plot of the loss", "plots"):
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    ends = np.cumsum([epoch.seconds for epoch in epochs])
    if curve:
        axes.plot(*zip(*curve, strict=True), linewidth=0.8, label="since the epoch began")
    axes.plot(ends, [epoch.loss for epoch in epochs], "o", label="of an epoch")
    axes.set(xlabel="seconds", ylabel="mean loss before each step" if curve else "mean loss")
    axes.legend()
    figure.savefig(file)
    pyplot.close(figure)
