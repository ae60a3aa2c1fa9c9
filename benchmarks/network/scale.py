"""Cost of each collective on simulated clusters of a thousand ranks and more.

Every run has its own process, so that its peak of memory is measured alone. Each rank's stream has
k random coordinates. What ranks do once, before the first step, is not counted. What the record has
already is not run again. Run it as

    python -m benchmarks.network.scale --output benchmarks/results/scale.json
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from math import log2

import torch

from benchmarks.clock import alone
from benchmarks.pages.tables import table
from benchmarks.record import NEEDED, Row, among, grid, options, recorded, run_here
from sparcel import SparseStream, simulate
from sparcel.core.collectives import ALGORITHMS, broadcast, gtopk, oktopk
from sparcel.core.collectives.doubling import halving_doubling
from sparcel.core.comm import Communicator, Network
from sparcel.core.formats import Expected
from sparcel.core.ops import SUM
from sparcel.core.schemes import Dense, Hierarchical, Request, Scheme, TopK
from sparcel.core.schemes.step import Step
from sparcel.core.wire import Wire

# With a second of latency and unlimited bandwidth, the seconds are the rounds.
ROUNDS = Network(latency_s=1)
ETHERNET = Network(latency_s=50e-6, bandwidth=125e6)
NODES = Network(
    latency_s=5e-6, bandwidth=12.5e9, ranks_per_node=8, node_latency_s=1e-6, node_bandwidth=100e9
)


def scalecom(stream: SparseStream, comm: Communicator, k: int) -> SparseStream:
    """Exchange as a step of ScaleCom does: rank 0's indices, then all ranks' values there."""
    wire, rows = Wire(comm), stream.values.new_empty(stream.nnz, 0)
    indices = SparseStream.unchecked(stream.indices, rows, stream.size)
    chosen = broadcast(
        indices, wire, 0, Expected(stream.size, stream.dtype, 0, k, stays_sparse=True)
    )
    ones = SparseStream(None, torch.ones(chosen.nnz), chosen.nnz)
    sums = halving_doubling(ones, wire)
    return SparseStream.unchecked(chosen.indices, sums.values, stream.size)


def per_node(ranks: int) -> int:
    """Return the ranks a node: 8, or half of the ranks if these are fewer."""
    return min(8, max(1, ranks // 2))


def two_levels(inner: Callable[[float], Scheme]) -> Callable[..., SparseStream]:
    """Return a step of a scheme between nodes, whose groups are there already."""

    def step(stream: SparseStream, comm: Communicator, k: int) -> SparseStream:
        scheme = Hierarchical(inner(k / stream.size), per_node(comm.size))
        gradient, request = stream.to_dense(), Request()
        plan = scheme.plan(gradient, comm, request)
        return scheme.reduce(Step(gradient, comm, request, plan, None)).average

    return step


SELECTING = {
    "gtopk": lambda stream, comm, k: gtopk(stream, Wire(comm), k).total,
    "oktopk": lambda stream, comm, k: oktopk(stream, Wire(comm), k, k).total,
    "scalecom": scalecom,
    "hitopk": two_levels(lambda density: TopK(density, algorithm="allgather")),
    "torus2d": two_levels(lambda density: Dense()),
}
NAMES = (*ALGORITHMS, *SELECTING)
ON_NODES = "hitopk", "torus2d"


def draw(rank: int, size: int, count: int) -> SparseStream:
    """Return a rank's stream of small integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(size, (count + count // 20 + 8,), generator=generator)
    while (indices := indices.unique()).numel() < count:
        indices = torch.cat((indices, torch.randint(size, (count,), generator=generator)))
    chosen = indices[torch.randperm(indices.numel(), generator=generator)[:count]].sort().values
    values = torch.randint(1, 9, (count,), generator=generator).float()
    return SparseStream(chosen, values, size)


def measure(name: str, ranks: int, size: int, count: int) -> Row:
    """Run one collective once, in this process."""

    def prepared(comm: Communicator) -> None:
        if name in ON_NODES:
            comm.grid(per_node(comm.size))

    def on_rank(comm: Communicator) -> tuple[int, float]:
        prepared(comm)
        stream = draw(comm.rank, size, count)
        if name in SELECTING:
            total = SELECTING[name](stream, comm, count)
        else:
            total = ALGORITHMS[name](stream, Wire(comm), SUM, count)
        return total.nnz, float(total.values.double().sum())

    start = time.perf_counter()
    report = simulate(ranks, on_rank, **vars(NODES))
    wall_s = time.perf_counter() - start
    before = simulate(ranks, prepared, **vars(NODES))
    if len(set(report.results)) > 1:
        raise SystemExit(f"{name}: ranks disagree: {set(report.results)}")
    expected = sum(float(draw(rank, size, count).values.sum()) for rank in range(ranks))
    if name not in SELECTING and report.results[0][1] != expected:
        raise SystemExit(f"{name}: the sum is {report.results[0][1]}, not {expected}")

    def seconds(network: Network) -> float:
        return report.seconds_on(network) - before.seconds_on(network)

    counted = list(zip(report.traffic, before.traffic, strict=True))
    crossing = zip(report.between_nodes, before.between_nodes, strict=True)
    return {
        "algorithm": name,
        "ranks": ranks,
        "wall_s": round(wall_s, 2),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rounds": seconds(ROUNDS),
        "messages": max(both.messages_sent - once.messages_sent for both, once in counted),
        "bytes": max(
            max(both.bytes_sent - once.bytes_sent, both.bytes_received - once.bytes_received)
            for both, once in counted
        ),
        "bytes_between_nodes": sum(both.bytes_sent - once.bytes_sent for both, once in crossing),
        "nnz": report.results[0][0],
        "ethernet_s": round(seconds(ETHERNET), 6),
        "nodes_s": round(seconds(NODES), 6),
    }


PAPERS: dict[str, Callable[[int, int, int], float]] = {
    "dense": lambda p, n, k: 2 * n * (p - 1) / p,
    "allgather": lambda p, n, k: 2 * k * (p - 1),
    "recursive_doubling": lambda p, n, k: 2 * k * (p - 1),
    "split_allgather": lambda p, n, k: (2 * k + n) * (p - 1) / p,
    "gtopk": lambda p, n, k: 2 * k * log2(p),
    "oktopk": lambda p, n, k: 6 * k * (p - 1) / p,
    "hitopk": lambda p, n, k: (
        (
            (per_node(p) - 1) * n
            + (p / per_node(p) - 1) * k
            + (per_node(p) - 1) * p / per_node(p) * k
        )
        / per_node(p)
    ),
}
"""The papers' closed forms, for P ranks and k of n coordinates, in words of 4 bytes.

If a form is an interval, its end for indices that hardly overlap. They are of Ok-Topk's table 1,
but those of SparCML's section 5.3.1 (`recursive_doubling`) and CommLib's equations 7, 9 and 10
(`hitopk`).
"""


def words_table() -> Iterator[str]:
    """Yield the lines of the table of words."""
    results = recorded("scale")
    size, count = results["size"], results["count"]
    found = {(row["algorithm"], row["ranks"]): row for row in results["rows"]}
    names, ranks = dict.fromkeys(name for name, _ in found), sorted({p for _, p in found})

    def words(name: str, p: int) -> str:
        paper = PAPERS[name](p, size, count) / count if name in PAPERS else None
        return compared(found[name, p]["bytes"] / 4 / count, paper)

    rows = (
        (f"`{name}`", *(words(name, p) if (name, p) in found else "" for p in ranks))
        for name in names
    )
    return table(("", *(f"P = {p}" for p in ranks)), rows)


def rounds_of_oktopk() -> str:
    """Return the sentence on its rounds, and on those of the form in the paper's table 1."""
    rows = [row for row in recorded("scale")["rows"] if row["algorithm"] == "oktopk"]
    ranks = [row["ranks"] for row in rows]
    forms = (2 * p + 2 * log2(p) for p in ranks)
    ours, on, theirs = map(listed, ((row["rounds"] for row in rows), ranks, forms))
    return f"`oktopk` takes {ours} rounds on {on} ranks, where the paper's form has {theirs}."


def listed(numbers: Iterable[float]) -> str:
    """Join whole numbers by commas, and the last by "and"."""
    *first, last = (f"{one:.0f}" for one in numbers)
    return f"{', '.join(first)} and {last}"


def described(network: dict[str, float]) -> str:
    """Describe the links of a network."""
    text = "{:g} Gbit/s and {:g} µs a message".format(
        network["bandwidth"] * 8 / 1e9, network["latency_s"] * 1e6
    )
    if network["ranks_per_node"] == 1:
        return text
    return "{:g} ranks a node: {} between nodes, {:g} Gbit/s and {:g} µs inside".format(
        network["ranks_per_node"],
        text,
        network["node_bandwidth"] * 8 / 1e9,
        network["node_latency_s"] * 1e6,
    )


def compared(ours: float, paper: float | None) -> str:
    """Format our value, bold if it is lower, and the paper's in brackets."""
    text = f"{ours:.1f}"
    if paper is None:
        return text
    return f"{f'**{text}**' if float(text) < float(f'{paper:.1f}') else text} ({paper:.1f})"


def main() -> None:
    """Run the benchmark."""
    arguments = options(
        __doc__,
        ranks=[4, 16, 64, 256, 1024],
        size=1_000_000,
        count=10_000,
        algorithms=among(NAMES),
        output=NEEDED,
    )
    size, count = arguments.size, arguments.count

    def work(algorithm: str, ranks: int) -> Row:
        found: Row = alone(measure, algorithm, ranks, size, count)
        return found

    jobs = [
        job
        for job in grid(ranks=arguments.ranks, algorithm=arguments.algorithms)
        if job["algorithm"] != "ring" or job["ranks"] <= 256  # beyond: two million messages
    ]
    networks = {"ethernet": vars(ETHERNET), "nodes": vars(NODES)}
    run_here(arguments.output, work, jobs, size=size, count=count, networks=networks)


if __name__ == "__main__":
    main()
