"""How much of what an island moves in 30 steps its largest coordinates hold.

    python -m benchmarks.outer.energy DATA

Shares of the squared norm of a pseudo-gradient, of a model that one process has trained for a
while: in the largest 1 of so many coordinates, and in the largest 64 of each 4,096 in a row, as
SparseLoCo selects.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch

from benchmarks.outer.training import ISLAND_TASKS, Curve
from benchmarks.record import RESULTS, Row, options, report
from benchmarks.training.tasks import batches, loss_of

WARM = {"text": 1000, "text, Muon": 1000, "words": 300, "wide words": 200}
EVERY, CHUNK, OF_CHUNK = 30, 4096, 64


def measured(data: Path, name: str) -> Row:
    """Return the shares of a task."""
    task = ISLAND_TASKS[name]
    curve = Curve(data, task, "diloco", 0, EVERY, WARM[name])
    model = deepcopy(curve.model)
    optimizers, split = task.optimizers(model), curve.split
    for batch in batches(len(split.y_train), task.batch, EVERY, 0):
        model.zero_grad()
        loss_of(model, split.x_train[batch], split.y_train[batch]).backward()
        task.update(model, optimizers, task.steps // 20)  # where the rate is the largest
    pairs = zip(model.parameters(), curve.model.parameters(), strict=True)
    energy = torch.cat([(after - before).detach().flatten() for after, before in pairs]).square()
    total, size = energy.sum(), energy.numel()
    largest = energy.sort(descending=True).values.cumsum(0)
    chunks = energy[: size // CHUNK * CHUNK].view(-1, CHUNK)
    return {
        "task": name,
        "parameters": size,
        **{f"1/{part}": float(largest[size // part] / total) for part in (64, 32, 16, 8)},
        "64 of 4096": float(chunks.topk(OF_CHUNK).values.sum() / chunks.sum()),
    }


def main() -> None:
    torch.set_num_threads(1)
    data = options(__doc__, "data").data
    report(RESULTS / "outer_energy.json", [measured(data, name) for name in WARM])


if __name__ == "__main__":
    main()
