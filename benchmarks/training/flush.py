"""In how many steps to flush memory: trainings that switch from sparse to dense in the middle.

    python -m benchmarks.training.flush DATA --steps 1 16 64 --lars

``DATA`` is as for ``convergence.py``. Each run trains sparsely for part of the steps, and densely
for the rest. Runs that the record has are not repeated. 0 steps forget what memory owes, which
`Handle.switch` never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

import sparcel
from benchmarks.record import Row, among, grid, run_all, runs_told
from benchmarks.training.task_training import Method, Run, evaluate
from benchmarks.training.tasks import TASKS
from sparcel.core.comm import Communicator
from sparcel.core.optim import LARS
from sparcel.core.training import Averager, residuals

RANKS, STEPS = 4, 1000
AFTER = 300
"""Of how many steps after the switch the losses are recorded, in means of ten."""
TRUST = 0.1
"""That of LARS, whose learning rate is that of SGD."""


class Switched(Run):
    """A training whose scheme becomes dense after some steps."""

    def __init__(
        self, data: Path, task: str, method: Method, seed: int, lars: bool, switch: int
    ) -> None:
        super().__init__(data, replace(TASKS[task], steps=STEPS), method, seed)
        if lars:
            self.optimizers = [LARS(self.model.parameters(), self.task.lr, trust=TRUST)]
        self.switch = switch
        self.norms: list[float] = []
        """The norms of the updates from the switch on."""
        self.age = 0.0

    def observe(
        self, comm: Communicator, step: int, gradients: Mapping[str, Tensor], averager: Averager
    ) -> None:
        if step == self.switch:
            self.age = averager.handle.memory_age()
            averager.handle.switch("dense")
            if not residuals.FLUSH_STEPS:
                averager._session.residuals.flush.owed.clear()

    def update(self, step: int) -> None:
        if step >= self.switch - 10:
            norms = [torch.linalg.vector_norm(p.grad) for p in self.named.values()]
            self.norms.append(float(torch.linalg.vector_norm(torch.stack(norms))))
        super().update(step)


def train(
    data: Path, task: str, lars: bool, density: float, switch: float, steps: int, seed: int
) -> Row:
    """Train once, and return the row."""
    method = Method("topk", "topk", {"density": density})
    at = round(switch * STEPS)
    with patch.object(residuals, "FLUSH_STEPS", steps):
        run = Switched(data, task, method, seed, lars, at)
        sparcel.simulate(RANKS, run.rank)
    tens = torch.tensor(run.losses[at - 100 : at + AFTER]).view(-1, 10).mean(1)
    return {
        **evaluate(run.model, run.split),
        "age": run.age,
        "losses": [round(float(loss), 4) for loss in tens],
        "norms": [round(norm, 4) for norm in run.norms[:40]],
    }


def main() -> None:
    told = runs_told(
        __doc__,
        "flush",
        tasks=among(TASKS, ["images"]),
        lars={"action": "store_const", "const": [True], "default": [False]},
        densities=[0.01, 0.001],
        switches=[0.5],
        steps=[0, 1, 16, 64, 256],
        seeds=[0],
    )
    jobs = grid(
        task=told.tasks,
        lars=told.lars,
        density=told.densities,
        switch=told.switches,
        steps=told.steps,
        seed=told.seeds,
    )
    run_all(told, train, jobs)


if __name__ == "__main__":
    main()
