"""CommLib's figures 7 and 8: HiTopKComm and its rivals on nodes of several ranks.

Run it in each rank of an emulated cluster, for figure 7 and for figure 8:

    sparcel lab run --nodes 2 --ranks-per-node 4 --rate 1gbit -- \
        python -m benchmarks.network.two_tiers --output benchmarks/results/two_tiers.json
    sparcel lab run --nodes 2 --ranks-per-node 4 --rate 1gbit -- \
        python -m benchmarks.network.two_tiers --breakdown \
        --output benchmarks/results/two_tiers_steps.json

The page also has figure 7 at 100 Mbit/s (`--rate 100mbit`, two_tiers_100mbit.json), and what
crosses between the nodes of clusters of any size, counted on the simulated cluster:

    python -m benchmarks.network.two_tiers --count \
        --output benchmarks/results/two_tiers_bytes.json

Figure 7 has gradients in float16. `NaiveAG` is `mstopk`: every rank's selection, gathered by all.
`TreeAR` sums and sends float16 along a tree (`tree.py`), `engine` is the engine's own all-reduce of
float16, and `2DTAR` is `torus2d` with float16 between nodes. `HiTopKComm` is `hitopk` with MSTopK.
Inside a node these two send float16. Values of selections travel as float32, the precision of the
memory. A time is that of a whole step, from the gradient to the average in float16: the slowest
rank's after a barrier, the median over interleaved rounds.

Figure 8 has gradients in float32. In both, the parts of a step are times of an average rank,
waiting for others included: of HiTopKComm its four steps and the rest. What crosses between the
nodes is counted at their interfaces, headers included.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.clock import Clock
from benchmarks.network.tree import tree_all_reduce
from benchmarks.pages.tables import table
from benchmarks.record import Row, network, options, report, rows_of
from sparcel import scheme, simulate
from sparcel.core import units
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Costs, Request, Scheme
from sparcel.tools.bench.contenders import BenchEngine, connected

METHODS = ("NaiveAG", "TreeAR", "engine", "2DTAR", "HiTopKComm")
SIZES = [1_000_000, 4_000_000, 16_000_000, 64_000_000]


def scheme_of(name: str, density: float, here: int, wire: str | None) -> Scheme | None:
    """Return the scheme of a method on nodes of so many ranks; None for sums."""
    made: dict[str, Callable[[], Scheme]] = {
        "NaiveAG": lambda: scheme("mstopk", density=density),
        "2DTAR": lambda: scheme("torus2d", wire=wire, ranks_per_node=here),
        "HiTopKComm": lambda: scheme(
            "hitopk", density=density, selector="mstopk", ranks_per_node=here
        ),
    }
    return made[name]() if name in made else None


@dataclass
class Stopwatch(Costs):
    """Costs that also keep the times of a step's parts, in order."""

    parts: list[float] = field(default_factory=list)

    @contextmanager
    def selecting(self) -> Iterator[None]:
        """See `Costs.selecting`."""
        with super().selecting(), self._kept():
            yield

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """See `Costs.communicating`."""
        with super().communicating(), self._kept():
            yield

    @contextmanager
    def _kept(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self.parts.append(perf_counter() - start)


class Ranks:
    """This rank's vectors, and the clock that all ranks share."""

    def __init__(self, engine: BenchEngine, size: int, dtype: torch.dtype, here: int) -> None:
        self.engine, self.comm, self.here = engine, engine.comm, here
        self.clock = Clock(engine.comm)
        own = torch.Generator().manual_seed(engine.comm.rank)
        self.gradient = torch.randn(size, generator=own).to(dtype)
        self.update = torch.empty_like(self.gradient)

    def method(self, name: str, density: float) -> Callable[[], Stopwatch]:
        """Return a step of a method, which writes the average to ``update``."""
        wire = None if self.gradient.dtype == torch.float32 else "float16"
        if made := scheme_of(name, density, self.here, wire):
            return self._step(made)
        comm = self.comm
        total: dict[str, Callable[[Tensor], object]] = {
            "TreeAR": lambda update: comm.run(lambda: tree_all_reduce(update, comm)),
            "engine": self.engine.all_reduce,
        }

        def run() -> Stopwatch:
            torch.div(self.gradient, comm.size, out=self.update)
            total[name](self.update)
            return Stopwatch()

        return run

    def _step(self, made: Scheme) -> Callable[[], Stopwatch]:
        def run() -> Stopwatch:
            watch = Stopwatch()
            made.step(self.gradient, self.comm, self.update, Request(costs=watch))
            return watch

        return run

    def timed(self, name: str, density: float, repeats: int) -> Iterator[Row]:
        """Time steps of a method, after one that warms up."""
        run = self.method(name, density)
        for repeat in range(-1, repeats):
            timed = self.clock.timed(run)
            parts = torch.tensor(timed.result.parts, dtype=torch.float64)
            self.comm.all_reduce(parts)
            mean = (1e3 * parts / self.comm.size).tolist()
            if repeat >= 0:
                yield {
                    "ms": timed.ms,
                    "parts_ms": [*mean, timed.mean_ms - sum(mean)],
                    "cpu_ms": timed.cpu_ms,
                    "crossed_bytes": timed.link_bytes,
                }


def merged(steps: list[Row]) -> Row:
    """Return the medians of a row's steps."""
    parts = [median(part) for part in zip(*(step["parts_ms"] for step in steps), strict=True)]
    times = [step["ms"] for step in steps]
    return {
        "ms": median(times),
        "all_ms": times,
        "parts_ms": parts,
        "cpu_ms": median(step["cpu_ms"] for step in steps),
        "crossed_bytes": median(step["crossed_bytes"] for step in steps),
    }


def measure(ranks: Ranks, jobs: list[tuple[str, float]], rounds: int, repeats: int) -> list[Row]:
    """Return a row for each method and density, measured in rounds."""
    found: dict[tuple[str, float], list[Row]] = {job: [] for job in jobs}
    for _ in range(rounds):
        for job in jobs:
            found[job] += ranks.timed(*job, repeats)
    size, dtype = ranks.gradient.numel(), str(ranks.gradient.dtype).removeprefix("torch.")
    return [
        {"method": name, "density": density, "size": size, "dtype": dtype, **merged(steps)}
        for (name, density), steps in found.items()
    ]


GRIDS = [(2, 4), (2, 8), (4, 8), (16, 8)]
"""Nodes, and ranks of each, for which bytes are counted."""
COUNTED, DENSITY = 1 << 18, 0.01


def count(name: str, nodes: int, here: int) -> Row:
    """Return the bytes of the busiest node, in the busier direction, for each coordinate."""
    made = scheme_of(name, DENSITY, here, "float16")

    def on_rank(comm: Communicator) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        gradient = torch.randn(COUNTED, generator=generator).half()
        if made is not None:
            made.fresh().step(gradient, comm)
        elif name == "TreeAR":
            tree_all_reduce(gradient, comm)
        else:
            comm.all_reduce(gradient)

    report = simulate(nodes * here, on_rank, ranks_per_node=here)
    busiest = max(
        sum(getattr(traffic, way) for traffic in report.between_nodes[start : start + here])
        for start in range(0, nodes * here, here)
        for way in ("bytes_sent", "bytes_received")
    )
    return {"method": name, "nodes": nodes, "ranks_per_node": here, "bytes": busiest / COUNTED}


def times_table() -> Iterator[str]:
    """Yield figure 7 as a table: medians, and the multiple of HiTopKComm's."""
    by_name = {
        name: [row for row in rows_of("two_tiers") if row["method"] == name] for name in METHODS
    }
    best = [row["ms"] for row in by_name["HiTopKComm"]]
    cells = {
        name: [
            f"{row['ms']:.0f} ms, {row['ms'] / least:.1f}×"
            for row, least in zip(own, best, strict=True)
        ]
        for name, own in by_name.items()
    }
    columns = (f"{row['size'] / 1e6:g} M" for row in by_name["HiTopKComm"])
    return table(("", *columns), ((f"`{name}`", *own) for name, own in cells.items()))


def bytes_table() -> Iterator[str]:
    """Yield the bytes that cross the busiest node's link for each coordinate."""
    rows = rows_of("two_tiers_bytes")
    found = {(row["method"], row["nodes"], row["ranks_per_node"]): row["bytes"] for row in rows}
    return table(
        ("", *(f"{nodes} × {here}" for nodes, here in GRIDS)),
        ((f"`{name}`", *(f"{found[name, *grid]:.2f}" for grid in GRIDS)) for name in METHODS),
    )


def tables() -> Iterator[str]:
    """Yield the lines of both tables."""
    yield from (*times_table(), *bytes_table())


def main() -> None:
    arguments = options(
        __doc__,
        breakdown=False,
        count=False,
        sizes={"type": units.whole, "nargs": "+"},
        densities={"type": float, "nargs": "+"},
        methods={"choices": METHODS, "nargs": "+", "metavar": "NAME"},
        rounds=3,
        repeats=3,
        output=Path,
    )
    if arguments.count:
        rows = [count(name, *grid) for grid in GRIDS for name in METHODS]
        report(arguments.output, rows, size=COUNTED, density=DENSITY)
        return
    torch.set_num_threads(1)  # the ranks share the cores
    breakdown = arguments.breakdown
    sizes = arguments.sizes or ([25_000_000, 110_000_000] if breakdown else SIZES)
    densities = arguments.densities or ([0.001, 0.01] if breakdown else [0.01])
    methods = arguments.methods or (METHODS[-1:] if breakdown else METHODS)
    dtype = torch.float32 if breakdown else torch.float16
    rows = []
    with connected(("gloo",)) as (engine,):
        for size in sizes:
            ranks = Ranks(engine, size, dtype, int(os.environ["LOCAL_WORLD_SIZE"]))
            jobs = [(name, density) for density in densities for name in methods]
            rows += measure(ranks, jobs, arguments.rounds, arguments.repeats)
            del ranks
        if engine.comm.rank == 0:
            report(arguments.output, rows, network=network())


if __name__ == "__main__":
    main()
