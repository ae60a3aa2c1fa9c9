"""What training in islands ends at: outer steps beside averaging in every step.

python -m benchmarks.outer.training DATA --tasks words --runs ddp dense,lr=0.7,momentum=0.9
"""

from __future__ import annotations

import math
import time
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

import sparcel
import sparcel.outer
from benchmarks.record import Row, among, grid, run_all, runs_told
from benchmarks.training.frontier import method_of
from benchmarks.training.models import Words
from benchmarks.training.task_training import Run, evaluate
from benchmarks.training.tasks import TASKS, Split, Task, batches, loss_of
from sparcel.core.comm import Communicator, Network
from sparcel.products.outer.method import METHODS

LINKS = {
    "100 Mbit/s, 50 ms": Network(latency_s=0.05, bandwidth=12.5e6),
    "20 Mbit/s, 100 ms": Network(latency_s=0.1, bandwidth=2.5e6),
}
NAMED = {**METHODS, "sparseloco by senders": partial(sparcel.outer.sparseloco, divisor="sent")}
"""The methods that runs may name."""

POINTS, TESTED = 20, 500
"""How often the loss is looked at, and on how many of the samples that are held out."""


def _of_text(split: Split) -> nn.Module:
    return Words(1 + int(split.x_train.max()), 48, 64, 2)


_WORDS = replace(TASKS["words"], batch=4, steps=3000, adamw={"fused": True})
_TEXT = Task(
    *("text", "tinyshakespeare", TASKS["characters"].read, _of_text, 4, 3000, 4e-3),
    adamw={"fused": True},
    clip=1.0,
)
ISLAND_TASKS = {
    "text": _TEXT,
    "text, Muon": replace(_TEXT, muon=True),
    "words": _WORDS,
    "words, Muon": replace(_WORDS, muon=True),
    "images": replace(TASKS["images"], batch=16, steps=3000),
    "wide words": replace(TASKS["wide words"], batch=1, steps=3000, adamw={"fused": True}),
}
"""The tasks; ``batch`` is that of one island."""


class Curve(Run):
    """A training whose loss is looked at now and then."""

    def __init__(self, data: Path, task: Task, run: str, seed: int, every: int, warm: int) -> None:
        words = run.split(",")
        settings = {
            key: int(text) if text.isdigit() else float(text)
            for key, _, text in (one.partition("=") for one in words)
            if text
        }
        words = [one for one in words if "=" not in one]
        method = method_of("dense" if words[0] in NAMED else ",".join(words))
        lr = task.lr * settings.pop("inner", 1.0)
        super().__init__(data, replace(task, lr=lr), method, seed)
        if warm:
            self.model.load_state_dict(warmed(data, task.name, task.muon, warm, seed))
        outer = NAMED[words[0]]() if words[0] in NAMED else sparcel.outer.Method(self.scheme)
        self.outer, self.every = replace(outer, **settings), every
        self.curve: list[tuple[int, float]] = []
        self.seconds: list[float] = []
        split = self.split
        self.seen = replace(split, x_test=split.x_test[:TESTED], y_test=split.y_test[:TESTED])

    def look(self, model: nn.Module, step: int) -> None:
        """Note the loss if a twentieth of the training has passed; ``step`` steps are done."""
        if step * POINTS // self.task.steps > len(self.curve):
            loss = evaluate(model, self.seen)["loss"]
            self.curve.append((step, math.nan if loss is None else round(loss, 5)))
            model.train()


@cache
def warmed(data: Path, name: str, muon: bool, steps: int, seed: int) -> dict[str, Any]:
    """Return the state of a model after steps of one process, at a constant rate at the end."""
    found = next(t for t in ISLAND_TASKS.values() if t.name == name and t.muon == muon)
    task = replace(found, batch=4 * found.batch, steps=steps, lr_end=0.5)
    run = Run(data, task, method_of("dense"), seed + 1000)
    run.alone(run.model)
    return run.model.state_dict()


class EveryStep(Curve):
    """DDP: gradients are averaged in every step, and rounded if ``bits`` is 16."""

    bits = 32

    def update(self, step: int) -> None:
        if self.bits == 16:  # as torch's hook does it, but for the order of roundings
            for parameter in self.model.parameters():
                parameter.grad = parameter.grad.bfloat16().float()
        super().update(step)
        self.look(self.model, step + 1)


class Islands(Curve):
    """Each rank is an island with a model of its own."""

    def rank(self, comm: Communicator) -> sparcel.training.Stats:
        task, model = self.task, deepcopy(self.model)
        optimizers = task.optimizers(model)
        outer = sparcel.outer.attach(model, optimizers, self.outer, every=self.every, islands=comm)
        samples, done = len(self.split.y_train), 0
        for step, batch in enumerate(
            batches(samples, task.batch * comm.size, task.steps, self.seed)
        ):
            start = time.thread_time()
            part = batch.chunk(comm.size)[comm.rank]
            model.zero_grad()
            loss = loss_of(model, self.split.x_train[part], self.split.y_train[part])
            loss.backward()
            task.update(model, optimizers, step)
            if comm.rank == 0 and outer.steps == done:
                self.seconds.append(time.thread_time() - start)
            elif comm.rank == 0:
                self.look(model, step + 1)
            done = outer.steps
        if comm.rank == 0:
            self.model = model
        return outer.stats()


def trained(
    data: Path, task: str, run: str, seed: int, islands: int, every: int, steps: int, warm: int
) -> Row:
    """Train once, and return the row."""
    used = replace(ISLAND_TASKS[task], steps=steps)
    whole = replace(used, batch=used.batch * islands)
    kind, comma, rest = run.partition(",")
    if kind in ("ddp", "bf16"):
        training: Curve = EveryStep(data, whole, "dense" + comma + rest, seed, 1, warm)
        training.bits = 16 if kind == "bf16" else 32
        training.alone(training.model)
        report = None
    elif kind == "attach":  # its default
        training = EveryStep(
            data, whole, "bidirectional,0.1,packed:4,front" + comma + rest, seed, 1, warm
        )
        report = sparcel.simulate(islands, training.rank)
    else:
        training = Islands(data, used, run, seed, every, warm)
        report = sparcel.simulate(islands, training.rank)
    row: dict[str, Any] = {
        **evaluate(training.model, training.split),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "curve": training.curve,
        "step_s": round(median(training.seconds or [0.0]), 5),
    }
    row["perplexity"] = None if row["loss"] is None else math.exp(row["loss"])
    if report is not None:
        exchanges = steps // training.every
        sent, received = (
            max(getattr(one, f"bytes_{way}") for one in report.traffic)
            for way in ("sent", "received")
        )
        row["bits_up"] = sent * 8 / exchanges / row["parameters"]
        row["bits_down"] = received * 8 / exchanges / row["parameters"]
        row["bytes_sent"] = sent
        for name, link in LINKS.items():
            row[f"exchange_s at {name}"] = round(report.seconds_on(link) / exchanges, 4)
    return row


def main() -> None:
    told = runs_told(
        __doc__,
        "outer_training",
        tasks=among(ISLAND_TASKS, ["words"]),
        runs={"nargs": "+", "required": True},
        seeds=[0],
        islands=[4],
        every=[30],
        steps=3000,
        warm=1000,
    )
    jobs = grid(
        task=told.tasks,
        every=told.every,
        islands=told.islands,
        seed=told.seeds,
        run=told.runs,
        steps=[told.steps],
        warm=[told.warm],
    )
    run_all(told, trained, jobs)


if __name__ == "__main__":
    main()
