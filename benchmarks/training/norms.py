"""Time of a layer-wise optimiser's norms, on every rank or shared by the ranks (PTO).

All norms of the parameters and gradients of ResNet-50, of a transformer and of a small model are
computed, and the rates of LARS from them (CommLib, equation 11): by every rank, and by
`core.optim.parallel`, made to share the work where the cost model would not. Values are random.
``chosen`` is what the cost model chooses. Rows take turns; a figure is the median of the rounds,
and that of a round is the slowest rank's. One thread a rank.

On a simulated cluster, where CPU time counts and ranks share the memory of the tensors:

    python -m benchmarks.training.norms --output benchmarks/results/norms_simulated.json

On real ranks, on as many cores, and in an emulated cluster:

    torchrun --nproc-per-node 2 -m benchmarks.training.norms --ranks \
        --output benchmarks/results/norms_2_cores.json
    sparcel lab run --nodes 8 --rate 1gbit -- python -m benchmarks.training.norms --ranks \
        --output benchmarks/results/norms_lab.json
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import Clock, gloo, in_turns
from benchmarks.pages.tables import table
from benchmarks.record import Row, options, report, rows_of
from sparcel import simulate
from sparcel.core import cost, kernels
from sparcel.core.comm import Communicator, Network, SimulatedCommunicator, resolve
from sparcel.core.cost import Rates, stated_rates
from sparcel.core.optim import parallel

Shapes = Iterator[tuple[int, ...]]

ALWAYS = stated_rates(bandwidth=1e12, latency_s=0, ranks=1, memory_bandwidth=1.0)
"""Rates by which it pays to share any work."""

NETWORKS = {
    "25 Gbit/s, 25 µs": {"bandwidth": 25e9 / 8, "latency_s": 25e-6},
    "1 Gbit/s, 1 ms": {"bandwidth": 1e9 / 8, "latency_s": 1e-3},
}
"""Each node's link. Messages inside a node take 10 µs and 10 GB/s."""
WITHIN = {"node_latency_s": 10e-6, "node_bandwidth": 10e9}
NODES = {8: 1, 128: 8}
"""Ranks of a node, by the number of ranks: 8 nodes, and the paper's 16 nodes of 8 GPUs."""


def resnet50() -> Shapes:
    """Yield the shapes of ResNet-50's 161 parameters, 25.6 million elements."""
    yield from convolution(64, 3, 7)
    inside = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            yield from convolution(width, inside, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, inside, 1)
            inside = 4 * width
    yield from linear(1000, inside)


def transformer(width: int = 512, words: int = 37_000) -> Shapes:
    """Yield the shapes of the base model of Vaswani et al. 2017: 101 million elements.

    Matrices of the source's words, the target's and the output's are not shared.
    """
    for _ in range(3):
        yield words, width
    for attentions in (1, 2):  # encoder and decoder
        for _ in range(6):
            for _ in range(attentions):
                for _ in range(4):
                    yield from linear(width, width)
                yield from ((width,), (width,))
            yield from linear(4 * width, width)
            yield from linear(width, 4 * width)
            yield from ((width,), (width,))


def small() -> Shapes:
    """Yield the shapes of a small CNN, 171 thousand elements."""
    for outside, inside in ((16, 1), (32, 16)):
        yield outside, inside, 5, 5
        yield (outside,)
    yield from linear(100, 1568)
    yield from linear(10, 100)


def convolution(outside: int, inside: int, kernel: int) -> Shapes:
    """Yield the shapes of a convolution without bias, and of the batch norm after it."""
    yield outside, inside, kernel, kernel
    yield (outside,)
    yield (outside,)


def linear(outside: int, inside: int) -> Shapes:
    """Yield the shapes of a linear layer."""
    yield outside, inside
    yield (outside,)


MODELS: dict[str, Callable[[], Shapes]] = {
    "ResNet-50": resnet50,
    "transformer": transformer,
    "small CNN": small,
}


def made(name: str) -> list[Tensor]:
    """Return a model's parameters, and then its gradients, at random."""
    generator = torch.Generator().manual_seed(0)
    shapes = [*MODELS[name](), *MODELS[name]()]
    return [torch.empty(shape).uniform_(-1, 1, generator=generator) for shape in shapes]


def everyone(tensors: list[Tensor], comm: Communicator) -> Tensor:
    """Compute all sums of squares on this rank."""
    return kernels.sums_of_squares([tensor.view(-1) for tensor in tensors])


def shared(tensors: list[Tensor], comm: Communicator) -> Tensor:
    """Share the sums among the ranks, if that pays by the communicator's rates."""
    return parallel(kernels.sums_of_squares, tensors, comm, additive=True)


Way = Callable[[list[Tensor], Communicator], Tensor]
WAYS: dict[str, Way] = {"everyone": everyone, "parallel": shared}


def rates_of(squares: Tensor) -> list[float]:
    """Return λ of each layer, with a decay of 5e-5."""
    norms = [math.sqrt(square) for square in squares.tolist()]
    half = len(norms) // 2
    pairs = zip(norms[:half], norms[half:], strict=True)
    return [0.001 * size / (slope + 5e-5 * size) for size, slope in pairs]


def chooses(tensors: list[Tensor], comm: Communicator, rates: Rates) -> bool:
    """Tell whether the ranks share the work by these rates; all ranks call."""
    comm.rates = rates
    shared(tensors, comm)  # the ranks compare sizes and rates the first time
    before = comm.traffic.messages_sent
    shared(tensors, comm)
    return comm.traffic.messages_sent > before


def row(model: str, ranks: int, times: dict[str, list[float]], **more: Any) -> Row:
    """Return a row of the record: medians in ms, and the least and the greatest."""
    result: Row = {"model": model, "ranks": ranks, **more}
    for way, seconds in times.items():
        result[f"{way}_ms"] = 1e3 * median(seconds)
        result[f"{way}_range_ms"] = [1e3 * min(seconds), 1e3 * max(seconds)]
    result["speedup"] = result["everyone_ms"] / result["parallel_ms"]
    return result


def on_simulated(model: str, ranks: int, rounds: int) -> Iterator[Row]:
    """Yield a row for each network; the same runs are timed on all of them."""
    tensors, here = made(model), NODES[ranks]
    networks = {
        name: Network(ranks_per_node=here, **link, **WITHIN) for name, link in NETWORKS.items()
    }
    times: dict[str, dict[str, list[float]]] = {
        name: {way: [] for way in WAYS} for name in networks
    }
    for number in range(rounds + 1):
        for way, compute in WAYS.items():

            def on_rank(comm: SimulatedCommunicator, compute: Way = compute) -> list[float]:
                comm.rates = ALWAYS
                return rates_of(compute(tensors, comm))

            report = simulate(ranks, on_rank, ranks_per_node=here, cpu_time=True)
            for name, network in networks.items():
                if number > 0:  # the first round warms up
                    times[name][way].append(report.seconds_on(network))
    for name, link in NETWORKS.items():
        rates = stated_rates(ranks=ranks, ranks_per_node=here, **link)
        chosen = simulate(ranks, lambda comm, rates=rates: chooses(tensors, comm, rates)).results
        yield row(model, ranks, times[name], network=name, chosen=chosen[0])


def on_ranks(comm: Communicator, rounds: int) -> Iterator[Row]:
    """Yield the rows of real ranks; all ranks call."""
    measured, clock = cost.measure(comm), Clock(comm)
    for model in MODELS:
        tensors = made(model)
        by_measured = chooses(tensors, comm, measured)
        by_default = chooses(tensors, comm, cost.default_rates())
        comm.rates = ALWAYS

        def timed(compute: Way, tensors: list[Tensor] = tensors) -> float:
            return 1e-3 * clock.timed(lambda: rates_of(compute(tensors, comm))).ms

        jobs = {way: partial(timed, compute) for way, compute in WAYS.items()}
        times = in_turns(jobs, rounds, 2)
        yield row(model, comm.size, times, chosen=by_measured, chosen_by_default=by_default)


RECORDS = {"simulated": "", "2_cores": "one machine", "lab": "lab, 1 Gbit/s"}
"""The records, and the networks of those whose rows name none."""


def all_tables() -> Iterator[str]:
    """Yield the lines of docs/records/commlib.md's table: a row for each network."""
    cells: dict[tuple[str, str], list[str]] = {}
    for name, network in RECORDS.items():
        for one in rows_of(f"norms_{name}"):
            times = f"{one['everyone_ms']:.3g} → {one['parallel_ms']:.3g} ms"
            place = str(one["ranks"]), one.get("network", network)
            cells.setdefault(place, []).append(f"**{times}**" if one["chosen"] else times)
    return table(("ranks", "network", *MODELS), ((*place, *own) for place, own in cells.items()))


def main() -> None:
    """Measure."""
    told = options(__doc__, ranks=False, rounds=21, output=Path)
    if told.ranks:
        with gloo() as rank:
            rows = list(on_ranks(resolve(), told.rounds))
        if rank:
            return
    else:
        torch.set_num_threads(1)
        every = product(NODES, MODELS)
        rows = [one for ranks, name in every for one in on_simulated(name, ranks, told.rounds)]
    report(told.output, rows, rounds=told.rounds)


if __name__ == "__main__":
    main()
