"""Time of a whole step of each scheme on ranks that share cores, beside the floors of memory.

Run it in each rank of an emulated cluster:

    sparcel lab run --nodes 8 --rate 1gbit -- python -m benchmarks.training.steps \
        --output benchmarks/results/steps.json

Gradients share a direction, as those of real training do: g = shared + 0.5·own. A scheme's memory
is emptied before each step, so that selections keep their distribution. A time is that of the
slowest rank after a barrier, the median of the repetitions. A scheme has three rows: its update is
written to a tensor (``none``), also subtracted from the parameters (``dense``), or applied as a
stream by `sparcel.optim.SGD` (``sparse``).

The floors are passes over vectors that all ranks make at once: one adds two vectors into a third,
one clears a vector, one subtracts a vector from another. Ratios are to the addition, because
machines differ. The limit of a row is the time of its own bytes on the link, plus 1.2 times what
``oktopk`` takes beside its bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from sparcel import scheme, units
from sparcel.bench.engines import ENGINES, BenchEngine, connected
from sparcel.comm import Communicator
from sparcel.ops import MAX

SCHEMES = ("oktopk", "topk", "sparcml", "gtopk", "scalecom", "mstopk", "dgc")
APPLIED = ("none", "dense", "sparse")
LEARNING_RATE = 0.1

Row = dict[str, Any]


class Ranks:
    """This rank's vectors, and the clock that all ranks share."""

    def __init__(self, engine: BenchEngine, size: int, repeats: int, rate: int) -> None:
        self.engine, self.repeats, self.rate = engine, repeats, rate
        own = torch.Generator().manual_seed(1 + engine.comm.rank)
        self.gradient = torch.randn(size, generator=torch.Generator().manual_seed(0))
        self.gradient.add_(torch.randn(size, generator=own), alpha=0.5)
        self.update, self.parameters = torch.zeros(size), torch.zeros(size)

    @property
    def comm(self) -> Communicator:
        """The communicator of the engine."""
        return self.engine.comm

    def timed(
        self, name: str, run: Callable[[], object], reset: Callable[[], object], **about: Any
    ) -> Row:
        """Time a call on all ranks at once, after two calls that warm up."""
        seconds, nbytes = [], 0
        for repeat in range(-2, self.repeats):
            reset()
            self.comm.run(lambda: self.comm.gather_numbers(0))
            before = replace(self.comm.traffic)
            start = perf_counter()
            run()
            if repeat >= 0:
                seconds.append(perf_counter() - start)
                now = self.comm.traffic
                sent = now.bytes_sent - before.bytes_sent
                nbytes = max(sent, now.bytes_received - before.bytes_received)
        measured = torch.tensor([*seconds, nbytes], dtype=torch.float64)
        self.comm.all_reduce(measured, MAX)
        *slowest, most = measured.tolist()
        return {
            "name": name,
            **about,
            "ms": 1e3 * median(slowest),
            "all_ms": [1e3 * each for each in slowest],
            "wire_ms": 8e3 * most / self.rate,
        }


def floors(ranks: Ranks) -> Iterator[Row]:
    """Time the passes over vectors that a step is made of."""
    gradient, update, parameters = ranks.gradient, ranks.update, ranks.parameters
    passes: dict[str, Callable[[], object]] = {
        "add": lambda: torch.add(gradient, parameters, out=update),
        "clear": update.zero_,
        "subtract": lambda: parameters.sub_(update),
    }
    for name, run in passes.items():
        yield ranks.timed(name, run, lambda: None)


def dense(ranks: Ranks) -> Row:
    """Time the engine's own all-reduce."""
    run = lambda: ranks.engine.all_reduce(ranks.update)  # noqa: E731
    return ranks.timed("all-reduce", run, ranks.update.zero_)


def step(ranks: Ranks, name: str, density: float, applied: str) -> Row:
    """Time a scheme's step, its update applied in the given way."""
    made = scheme(name, density=density)
    gradient, update, parameters = ranks.gradient, ranks.update, ranks.parameters

    def forget() -> None:
        for remembered in made.coordinates().values():
            remembered.zero_()

    def write() -> None:
        made.step(gradient, ranks.comm, out=update)

    def subtract() -> None:
        write()
        parameters.sub_(update)

    run = {"none": write, "dense": subtract}.get(applied) or sparsely(made, ranks)
    return ranks.timed(name, run, forget, density=density, applied=applied)


def sparsely(made: Any, ranks: Ranks) -> Callable[[], None]:
    """Return a step whose update stays a stream."""
    from sparcel.optim import SGD

    optimizer = SGD([ranks.parameters], lr=LEARNING_RATE)
    return lambda: optimizer.step([made.step_stream(ranks.gradient, ranks.comm)])


def compare(rows: list[Row]) -> None:
    """Add each row's ratio to the addition, and its limit where ``oktopk`` was measured alike."""
    addition = next(row["ms"] for row in rows if row["name"] == "add")
    beside = {
        (row["density"], row["applied"]): row["ms"] - row["wire_ms"]
        for row in rows
        if row["name"] == "oktopk"
    }
    for row in rows:
        row["over_add"] = row["ms"] / addition
        rest = beside.get((row.get("density"), row.get("applied")))
        row["limit_ms"] = None if rest is None else row["wire_ms"] + 1.2 * rest


def table(rows: list[Row]) -> Table:
    """Return the rows as a table to print."""
    shown = Table("", "density", "applied", "ms", "÷ add", "wire ms", "limit ms")
    for row in rows:
        density, limit = row.get("density"), row["limit_ms"]
        shown.add_row(
            row["name"],
            "" if density is None else f"{density:.2%}",
            row.get("applied", ""),
            f"{row['ms']:.1f}",
            f"{row['over_add']:.2f}",
            f"{row['wire_ms']:.1f}",
            "" if limit is None else f"{limit:.1f}",
        )
    return shown


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=units.whole, default=16_000_000)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--schemes", nargs="*", default=SCHEMES, metavar="NAME")
    parser.add_argument("--applied", nargs="+", choices=APPLIED, default=APPLIED)
    parser.add_argument("--engine", choices=ENGINES, default="gloo")
    parser.add_argument("--rate", type=units.bits_per_s, default="1gbit", help="of each link")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)  # the ranks share the cores
    with connected((arguments.engine,)) as (engine,):
        ranks = Ranks(engine, arguments.size, arguments.repeats, arguments.rate)
        rows = [*floors(ranks), dense(ranks)]
        for density in arguments.densities:
            for name in arguments.schemes:
                rows += [step(ranks, name, density, applied) for applied in arguments.applied]
        compare(rows)
        if engine.comm.rank:
            return
        Console(highlight=False, width=100).print(table(rows))
        if arguments.output is not None:
            settings = vars(arguments) | {"output": None, "ranks": engine.comm.size}
            document = {**machine(), "settings": settings, "rows": rows}
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
