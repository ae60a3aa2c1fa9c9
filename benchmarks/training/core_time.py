"""Processor time of a step of each method, a parameter and rank, beside Gloo's own all-reduce.

    python -m benchmarks.training.core_time --output benchmarks/results/core_time.json

Ranks are processes of this machine, joined by loopback, with one thread each. Their gradients share
a direction, as those of real training do: g = shared + 0.5·own, new in each step. All rows take
turns, several times. A figure is the mean over the ranks of `process_time` from the beginning of
some steps to their end, and the median of the turns. This counts what the engine's threads and the
kernel do for a rank. The *share* is the time in proportion to Gloo's float32 in the same turn.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.clock import Clock
from benchmarks.record import Row, among, itself, options, report
from sparcel import scheme
from sparcel.core import units
from sparcel.core.schemes import SPARSER, Scheme
from sparcel.tools.bench.contenders import BenchEngine, connected
from sparcel.tools.lab import Loopback, Workers

WARM_UP, GRADIENTS = 12, 3
"""Steps before the first turn, in which memories fill up; gradients that take turns."""

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "default": scheme,
    "10 %, packed:4": partial(scheme, **SPARSER),
    "oktopk 10 %, packed:4": partial(scheme, "oktopk", density=0.1, format="packed:4"),
    "topk 10 %, packed:4": partial(scheme, "topk", density=0.1, format="packed:4"),
    "gtopk 10 %, packed:4": partial(scheme, "gtopk", density=0.1, format="packed:4"),
    "scalecom 10 %, packed:4": partial(scheme, "scalecom", density=0.1, format="packed:4"),
    "topk 1 %": partial(scheme, "topk", density=0.01),
    "gtopk 1 %": partial(scheme, "gtopk", density=0.01),
    "all, 4 bits": partial(scheme, "topk", density=1, format="raw:4"),
    "all, 2 bits": partial(scheme, "topk", density=1, format="raw:2"),
}
GLOO = ("gloo float32", "gloo bfloat16")
RANK_OF = "SPARCEL_CORE_TIME"
"""Set in the processes that are ranks."""


class Ranks:
    """This rank's gradients, and the method that is measured."""

    def __init__(self, engine: BenchEngine, size: int) -> None:
        self.engine, self.comm, self.size = engine, engine.comm, size
        self.clock = Clock(engine.comm)
        shared = torch.randn(size, generator=torch.Generator().manual_seed(0))
        own = torch.Generator().manual_seed(1 + self.comm.rank)
        self.gradients = [shared + 0.5 * torch.randn(size, generator=own) for _ in range(GRADIENTS)]
        self.vector = torch.empty(size)
        self.steps = 0

    def timed(self, run: Callable[[], object], steps: int) -> tuple[float, float]:
        """Return the ranks' mean processor time, and the time that passes, in ns a parameter."""
        found = []
        for _ in range(steps):
            self.vector.copy_(self.gradients[self.steps % GRADIENTS])
            self.steps += 1
            found.append(self.clock.timed(run))
        each = 1e6 / self.size
        return each * mean(one.cpu_ms for one in found), each * mean(one.mean_ms for one in found)

    def runs(self, names: list[str]) -> dict[str, Callable[[], object]]:
        """Return what does a step, by name; the update comes where the gradient was."""
        float32, bfloat16 = self.engine.all_reduce, torch.empty(self.size, dtype=torch.bfloat16)

        def rounded() -> None:
            bfloat16.copy_(self.vector)
            float32(bfloat16)
            self.vector.copy_(bfloat16)

        runs: dict[str, Callable[[], object]] = dict(
            zip(GLOO, (lambda: float32(self.vector), rounded), strict=True)
        )
        for name in names:
            runs[name] = partial(SCHEMES[name]().step, self.vector, self.comm, in_place=True)
        return runs


def measured(ranks: Ranks, names: list[str], turns: int, steps: int) -> list[Row]:
    """Measure all rows on these ranks; all of them call, and get the same."""
    runs = ranks.runs(names)
    for run in runs.values():
        ranks.timed(run, WARM_UP)
    times = [{name: ranks.timed(run, steps) for name, run in runs.items()} for _ in range(turns)]
    return [
        {
            "ranks": ranks.comm.size,
            "size": ranks.size,
            "name": name,
            "core_ns": median(turn[name][0] for turn in times),
            "wall_ns": median(turn[name][1] for turn in times),
            "share": median(turn[name][0] / turn[GLOO[0]][0] for turn in times),
            "all_core_ns": [turn[name][0] for turn in times],
        }
        for name in runs
    ]


def on_processes(ranks: int) -> list[Row]:
    """Run this command on so many processes, and return the rows of rank 0."""
    rows: list[Row] = []
    argv = [sys.executable, *itself(), *sys.argv[1:]]
    environment = {"OMP_NUM_THREADS": "1", RANK_OF: "1"}
    with Loopback(ranks) as network, Workers(network, argv, environment) as workers:
        for rank, line in workers.lines():
            if rank == 0 and line.startswith("{"):
                rows.append(json.loads(line))
            elif rank == 0:
                print(line)
    return rows


def main() -> None:
    arguments = options(
        __doc__,
        ranks=[4, 8],
        size={"type": units.whole, "default": 5_000_000},
        schemes=among(SCHEMES),
        turns=7,
        steps=3,
        output=Path,
    )
    if RANK_OF in os.environ:
        torch.set_num_threads(1)
        with connected(("gloo",)) as (engine,):
            ranks = Ranks(engine, arguments.size)
            rows = measured(ranks, arguments.schemes, arguments.turns, arguments.steps)
        if engine.comm.rank == 0:
            print(*map(json.dumps, rows), sep="\n", flush=True)
        return
    load = os.getloadavg()
    rows = [row for ranks in arguments.ranks for row in on_processes(ranks)]
    report(arguments.output, rows, load=load)


if __name__ == "__main__":
    main()
