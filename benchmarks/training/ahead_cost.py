"""What step-ahead takes of a step: the same training with and without it, in turns.

    python -m benchmarks.training.ahead_cost

One process trains an MLP on a batch of random numbers, alone in its group, so that nothing is
exchanged and the selection is what remains of the method. Each size has a training that is ahead
and one that is not; their steps take turns. Times are the processor's, of one thread. A figure is
the median over `STEPS` steps, after `WARM_UP` steps that lay out the memory. ``ahead_ns`` is what
the forward passes differ by, for each parameter.
"""

from __future__ import annotations

import os
from itertools import product
from statistics import median
from time import process_time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparcel
from benchmarks.clock import gloo, in_turns
from benchmarks.record import RESULTS, Row, report

WIDTHS, BATCH, STEPS, WARM_UP = (512, 1024, 2048, 4096), 64, 41, 5
WIDEST_MUON = 1024
"""Its own steps take seconds beyond that."""
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-4),
    "Muon": lambda ps: torch.optim.Muon([one for one in ps if one.dim() == 2], lr=1e-4),
}


class Training:
    """A model in DDP, and its data."""

    def __init__(self, width: int, optimizer: str, ahead: bool) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU()))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.handle = sparcel.attach(self.model, "topk", density=0.01, ahead=ahead)
        self.data = torch.randn(BATCH, width)

    def step(self) -> tuple[float, float]:
        """Do a step, and return the seconds of its forward pass, and of all of it."""
        start = process_time()
        loss = self.model(self.data).square().mean()
        forward = process_time() - start
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return forward, process_time() - start


def row(width: int, optimizer: str) -> Row:
    """Return the milliseconds of forward passes and of steps, with step-ahead and without."""
    trainings = {ahead: Training(width, optimizer, ahead) for ahead in (False, True)}
    steps = {ahead: training.step for ahead, training in trainings.items()}
    found: Row = {"parameters": width * (width + 1), "optimizer": optimizer}
    for ahead, times in in_turns(steps, STEPS, WARM_UP).items():
        for what, seconds in zip(("forward", "step"), zip(*times, strict=True), strict=True):
            found[f"{what}_ms" if ahead else f"{what}_without_ms"] = 1000 * median(seconds)
        trainings[ahead].handle.close()
    added = found["forward_ms"] - found["forward_without_ms"]
    found["ahead_ns"] = 1e6 * added / found["parameters"]
    return found


def main() -> None:
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= alone
    with gloo():
        rows = [
            row(width, optimizer)
            for width, optimizer in product(WIDTHS, OPTIMIZERS)
            if optimizer != "Muon" or width <= WIDEST_MUON
        ]
    report(RESULTS / "ahead_cost.json", rows)


if __name__ == "__main__":
    main()
