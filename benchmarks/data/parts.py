"""Train an image task on parts of the set, as `sparcel.data.PartSampler` makes them.

    python -m benchmarks.data.parts DATA

``DATA`` holds the folders of the tasks. Eight ranks on four nodes take eight samples each a step.
All of a node's samples are of its part; ``full`` shuffles the whole set over all ranks instead, as
DistributedSampler does. The ranks' gradients are averaged, so one process that adds them up trains
the same. With ``batchnorm`` each rank's samples are normalised by themselves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import Tensor

from benchmarks.record import Row, among, grid, grouped, run_all, runs_told
from benchmarks.training.task_training import evaluate
from benchmarks.training.tasks import TASKS, loss_of
from sparcel import simulate
from sparcel.products.data import PartSampler

NODES, SHARING = 4, 2
RANKS = NODES * SHARING
SAMPLES = 12_800
"""Of the set's 50,000, so that a training has ten epochs."""

PARTS: dict[str, dict[str, int | None]] = {
    "full": {},
    "kept": {"exchange_every": None},
    "exchanged every 4 epochs": {"exchange_every": 4},
    "exchanged every epoch": {"exchange_every": 1},
}


def orders(parts: str, epochs: int, seed: int) -> Tensor:
    """Return what each rank reads in the epochs, ``[samples, RANKS]``."""

    def on_rank(comm: object) -> list[int]:
        sampler = PartSampler(SAMPLES, comm, seed=seed, **PARTS[parts])  # type: ignore[arg-type]
        read = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            read += sampler
        return read

    if parts == "full":
        draw = np.random.default_rng(seed)
        read = np.concatenate([draw.permutation(SAMPLES) for _ in range(epochs)])
        return torch.from_numpy(read.reshape(-1, RANKS))
    results = simulate(RANKS, on_rank, ranks_per_node=SHARING).results
    return torch.tensor(results).T


def train(data: Path, task: str, parts: str, seed: int, steps: int) -> Row:
    """Train once and return the row of results."""
    torch.set_num_threads(1)
    settings = replace(TASKS[task], steps=steps)
    split = settings.read(data / settings.folder, seed)
    chosen = torch.from_numpy(np.random.default_rng(0).permutation(len(split.y_train))[:SAMPLES])
    x, y = split.x_train[chosen], split.y_train[chosen]
    torch.manual_seed(seed)
    model = settings.model(split)
    (optimizer,) = settings.optimizers(model)
    each = settings.batch // RANKS
    read = orders(parts, -(-steps * settings.batch // SAMPLES), seed)
    for step in range(steps):
        batch = read[step * each :][:each].T.reshape(-1)
        optimizer.zero_grad()
        shares = batch.split(each) if task == "batchnorm" else [batch]
        for share in shares:
            (loss_of(model, x[share], y[share]) / len(shares)).backward()
        settings.update(model, [optimizer], step)
    return evaluate(model, split)


def parts_sentence(rows: list[Row]) -> str:
    """Return the accuracies of trainings that read parts, beside those of the whole set."""
    found = grouped(rows, "parts")
    full, kept, every_4, every = (
        f"{100 * mean(row['accuracy'] for row in found[one]):.1f} %"
        for one in ("full", "kept", "exchanged every 4 epochs", "exchanged every epoch")
    )
    return (
        f"{full} with the full set, {kept} with kept parts, {every_4} with parts that are exchanged"
        f" every 4 epochs, and {every} with those exchanged in every epoch"
    )


def main() -> None:
    told = runs_told(
        __doc__, "data_parts", tasks=among(TASKS, ["images", "batchnorm"]), seeds=3, steps=2000
    )
    seeds = range(told.seeds)
    run_all(told, train, grid(seed=seeds, task=told.tasks, parts=PARTS, steps=[told.steps]))


if __name__ == "__main__":
    main()
