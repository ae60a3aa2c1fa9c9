"""What step-ahead is worth where Muon trains: a small language model of bytes, by several rules.

    python -m benchmarks.training.muon DATA

Muon trains the matrices of the layers, AdamW the rest, on eight simulated ranks. The parameters of
AdamW are ahead in all runs but the dense ones. Runs that the record has are not repeated. ``DATA``
is as for ``convergence.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Muon
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

import sparcel
from benchmarks.record import Row, among, run_all, runs_told
from benchmarks.training.models import Words
from benchmarks.training.task_training import Method, Run, evaluate
from benchmarks.training.tasks import TASKS, Task
from sparcel.core.comm import Communicator
from sparcel.core.training import Averager

RANKS, LENGTH, TESTED, LR = 8, 48, 1000, 0.02
TASK = Task(
    "bytes",
    "tinyshakespeare",
    TASKS["characters"].read,
    lambda split: Words(1 + int(split.x_train.max()), LENGTH, width=64),
    batch=16,
    steps=200,
    lr=2e-3,
    adamw={},
    clip=1.0,
    muon=True,
)


class Orthogonal(Muon):
    """Muon that says what the memory adds to its update, at the price of two updates."""

    @staticmethod
    def two_steps(
        gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[float, Tensor]:
        if not state:
            return 0.0, gradient
        beta, before = group["momentum"], group["momentum"] * state["momentum_buffer"]
        rest = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        with_it, without = (
            _zeropower_via_newtonschulz(one, *rest)
            for one in (before + (1 - beta**2) * gradient, before)
        )
        adjusted = _adjust_lr(group["lr"], group["adjust_lr_fn"], group["shape"])
        return adjusted, (with_it - without).to(gradient.dtype)


WAYS: dict[str, type[Muon] | None] = {
    "dense": None,
    "stays": None,
    "along memory": Muon,
    "orthogonal": Orthogonal,
}
"""How Muon's parameters move: by its rule, or not at all."""


class Bytes(Run):
    """A training in which Muon has the matrices."""

    def __init__(self, data: Path, way: str, density: float, seed: int) -> None:
        settings = {"density": density, "format": "packed:4"}
        method = Method(way, "topk", settings, frontload=False)
        if way == "dense":
            method = Method(way, "dense", ahead=False)
        super().__init__(data, TASK, method, seed)
        muon, *self.optimizers = self.optimizers
        self.rule = WAYS[way]
        self.muon = (self.rule or Muon)(muon.param_groups[0]["params"], lr=LR)

    def observe(
        self, comm: Communicator, step: int, gradients: Mapping[str, Tensor], averager: Averager
    ) -> None:
        """Let step-ahead know the second optimiser."""
        ahead = averager._session.ahead
        if step == 0 and self.rule and ahead is not None:
            ahead.follow(self.muon)

    def update(self, step: int) -> None:
        super().update(step)
        for group in self.muon.param_groups:
            group["lr"] = LR * TASK.lr_at(step) / TASK.lr
        self.muon.step()


def trained(data: Path, way: str, density: float, seed: int) -> Row:
    """Train once, and return the row."""
    training = Bytes(data, way, density, seed)
    sparcel.simulate(RANKS, training.rank)
    split = training.split
    tested = replace(split, x_test=split.x_test[:TESTED], y_test=split.y_test[:TESTED])
    return {"steps": TASK.steps, **evaluate(training.model, tested)}


def main() -> None:
    told = runs_told(__doc__, "muon", ways=among(WAYS), densities=[0.1], seeds=[0, 1, 2])
    jobs = [
        {"way": way, "density": 1.0 if way == "dense" else density, "seed": seed}
        for seed, density, way in product(told.seeds, told.densities, told.ways)
    ]
    run_all(told, trained, jobs)


if __name__ == "__main__":
    main()
