"""Time that the exchange adds to a step, with one selection a bucket and with one over the model.

Run it in each rank of an emulated cluster:

    sparcel lab run --nodes 4 --rate 1gbit -- python -m benchmarks.training.scopes \
        --output benchmarks/results/scopes.json

A model of equal layers, one a bucket, is trained on random data. ``added_ms`` is what a step takes
beyond the same step without an exchange. By bucket it can be less than selection and exchange take,
because a bucket is sent while later ones are computed; over the model it can't. All rows take
turns. A rank's figure is the median of its steps, a row's the mean over ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparcel
from benchmarks.clock import gathered, gloo, in_turns
from benchmarks.record import machine, options, show, write

SCHEMES = ("topk", "gtopk", "oktopk")
SCOPES = ("bucket", "model")
WARM_UP = 3
"""Steps of each row before the first turn; DDP rebuilds its buckets in them."""

Figures = dict[str, float]


class Training:
    """One row: a model of its own."""

    def __init__(self, arguments: argparse.Namespace, scheme: str, scope: str) -> None:
        torch.manual_seed(0)
        width = arguments.width
        layers = [nn.Linear(width, width, bias=False) for _ in range(arguments.layers)]
        self.model = DistributedDataParallel(
            nn.Sequential(*layers),
            bucket_cap_mb=4 * width * width / 2**20,
            gradient_as_bucket_view=True,
        )
        self.handle = sparcel.attach(
            self.model, scheme, density=arguments.density, scope=scope, frontload=False
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.batch = torch.randn(arguments.batch, width, generator=generator)

    def timed(self) -> float:
        """Return the seconds of a forward and a backward pass, which all ranks begin together."""
        self.model.zero_grad()
        self.handle.meet()
        start = perf_counter()
        self.model(self.batch).square().mean().backward()
        return perf_counter() - start

    def step(self) -> Figures:
        """Time a step with the exchange, and one without."""
        step_s = self.timed()
        last = self.handle.stats().last
        with self.model.no_sync():
            compute_s = self.timed()
        return {
            "step_ms": 1e3 * step_s,
            "added_ms": 1e3 * (step_s - compute_s),
            "select_ms": 1e3 * last.select_seconds,
            "communicate_ms": 1e3 * last.communicate_seconds,
            "sent_kb": last.bytes_sent / 1e3,
            "messages": last.messages_sent,
        }


def mean_of_medians(steps: list[Figures]) -> Figures:
    """Return the medians of steps as means over ranks; all ranks call."""
    ranks = gathered({name: median(step[name] for step in steps) for name in steps[0]})
    return {name: mean(rank[name] for rank in ranks) for name in ranks[0]}


def measured(arguments: argparse.Namespace) -> dict[str, Figures]:
    """Let all rows take turns, and return them by name."""
    trainings = {
        f"{scheme}, {scope}": Training(arguments, scheme, scope)
        for scheme in SCHEMES
        for scope in SCOPES
    }
    steps = {name: training.step for name, training in trainings.items()}
    rows = {
        name: mean_of_medians(found)
        for name, found in in_turns(steps, arguments.steps, WARM_UP).items()
    }
    for training in trainings.values():
        training.handle.close()
    return rows


def main() -> None:
    """Measure all rows, and write them from rank 0."""
    arguments = options(
        __doc__, layers=8, width=1024, batch=64, density=0.01, steps=40, output=Path
    )
    with gloo() as rank:
        rows = measured(arguments)
        settings = {"ranks": dist.get_world_size(), **vars(arguments)}
    if rank == 0:
        show({"row": name, **row} for name, row in rows.items())
        if (output := settings.pop("output")) is not None:
            write(output, {**machine(), "settings": settings}, rows)


if __name__ == "__main__":
    main()
