"""The bytes and rounds of formulas are near those that the simulated cluster counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparcel import SparseStream, scheme, simulate
from sparcel.core.collectives import (
    ALGORITHMS,
    all_gather,
    broadcast,
    gathered_topk,
    gtopk,
    oktopk,
    reduce_scatter,
)
from sparcel.core.comm import Communicator
from sparcel.core.cost import COLLECTIVES, STEPS, Counts, Problem, count
from sparcel.core.formats import format_named
from sparcel.core.ops import SUM
from sparcel.core.schemes import ON_NODES, SEND_ALL
from sparcel.core.wire import Wire

NEAR = 0.08
"""By how much the bytes of the busiest rank may differ from what is told, as a share of them."""

APART = 64
"""And by how many bytes in each round: headers, padding, and counts of few entries."""

OF_OKTOPK = 0.1, 256
"""The same of a collective whose data decide how often ranks sum counts, and how many."""

CALLS: dict[str, Callable] = {
    **{
        name: lambda stream, wire, k, sum=sum: sum(stream, wire, SUM, k)
        for name, sum in ALGORITHMS.items()
    },
    "gtopk": gtopk,
    "gathered_topk": lambda stream, wire, k: gathered_topk(stream, wire, k, k),
    "oktopk": lambda stream, wire, k: oktopk(stream, wire, k, k),
    "all_gather": lambda stream, wire, k: all_gather(stream, wire),
    "reduce_scatter": lambda stream, wire, k: reduce_scatter(stream, wire),
    "broadcast": lambda stream, wire, k: broadcast(stream, wire, 0),
}


def anywhere(ranks: int, size: int, k: int, seed: int = 0) -> list[torch.Tensor]:
    """Return k indices for each rank, drawn independently."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(size, generator=generator)[:k].sort().values for _ in range(ranks)]


def streams_at(indices: Sequence[torch.Tensor], size: int) -> list[SparseStream]:
    """Return streams at these indices, with values whose sums are never zero."""
    return [
        SparseStream(own, 1.0 + (own * (rank + 3)) % 61, size) for rank, own in enumerate(indices)
    ]


problems = st.builds(
    lambda size, share, ranks, alike, format: Problem(
        size,
        k := max(1, round(size / share)),
        ranks,
        spread=k if alike else None,
        format=format_named(format),
    ),
    st.integers(1, 40_000),
    # Of about half of the coordinates, one entry more or less decides which form messages have.
    st.floats(1, 300).filter(lambda share: abs(share - 2) > 0.5),
    st.sampled_from([1, 2, 3, 5, 6, 7, 8, 9, 13, 16, 17, 24, 33]),
    st.booleans(),
    st.sampled_from(["raw", "packed", "packed:4", "chunked", "raw:8"]),
)


def test_every_collective_is_compared() -> None:
    assert set(COLLECTIVES) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=settings.default.max_examples * 3 // 5)
@given(problems, st.integers(0, 99))
def test_bytes_are_near_and_rounds_are_those_that_are_told(
    name: str, problem: Problem, seed: int
) -> None:
    """Normal values lie anywhere, or evenly, on all ranks alike, where the spread says so."""
    ranks, k = problem.ranks, problem.k
    draw = torch.Generator().manual_seed(seed)
    indices = anywhere(ranks, problem.size, k, seed)
    if problem.spread:
        indices = [torch.arange(k) * problem.size // k] * ranks
    streams = [SparseStream(own, torch.randn(k, generator=draw), problem.size) for own in indices]
    report = simulate(
        ranks,
        lambda comm: CALLS[name](streams[comm.rank], Wire(comm, problem.format), k),
        latency_s=1,
    )
    told, rounds = count(COLLECTIVES[name], problem), round(report.seconds)
    volume = max(traffic.volume for traffic in report.traffic)
    near(told, volume, rounds, *OF_OKTOPK if name == "oktopk" else ())
    if name == "oktopk":  # its data decide how often the ranks sum counts
        assert told.rounds == pytest.approx(rounds, rel=0.3)
    else:
        assert told.rounds == rounds


def near(told: Counts, volume: float, rounds: int, share: float = NEAR, apart: int = APART) -> None:
    most = max(told.bytes_sent, told.bytes_received)
    assert abs(most - volume) <= share * volume + apart * rounds, (told, volume)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dense", {}),
        ("topk", {}),
        ("gtopk", {}),
        ("oktopk", {}),
        ("scalecom", {}),
        ("scalecom", {"format": "packed:4"}),
        ("hitopk", {}),
        ("hitopk", {"format": "packed:4"}),
        ("torus2d", {}),
        ("torus2d", {"dtype": torch.float16}),
    ],
)
def test_steps_send_about_what_is_told(name: str, settings: dict[str, Any], ranks: int) -> None:
    """ScaleCom's rank 0 leads in the first step. Nodes tell each other where they are before it."""
    settings, size = dict(settings), 50_000
    dtype = settings.pop("dtype", torch.float32)
    here = next(count for count in (2, 3, 1) if ranks % count == 0) if name in ON_NODES else 1
    settings |= {"ranks_per_node": here} if name in ON_NODES else {}
    settings |= {} if name in SEND_ALL else {"density": 0.02}

    def on_rank(comm: Communicator) -> float:
        comm.grid(here)
        before = replace(comm.traffic)
        draw = torch.Generator().manual_seed(comm.rank)
        gradient = torch.randn(size, generator=draw).to(dtype)
        scheme(name, **settings).step(gradient, comm)
        sent = comm.traffic.bytes_sent - before.bytes_sent
        return max(sent, comm.traffic.bytes_received - before.bytes_received)

    format = format_named(settings.get("format", "raw"))
    problem = Problem(size, size // 50, ranks, here, dtype.itemsize, format=format)
    told = count(STEPS[name], problem)
    near(told, max(simulate(ranks, on_rank).results), told.rounds)
