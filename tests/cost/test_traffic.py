"""The traffic in an algorithm's stages equals the simulated cluster's counters, on every rank."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream, scheme, simulate
from sparcel.collectives import ALGORITHMS, OTHER_STAGES, gathered_topk, gtopk, oktopk
from sparcel.collectives import _global_topk as global_topk_module
from sparcel.collectives import regions as regions_module
from sparcel.collectives._counts import Counted
from sparcel.collectives.oktopk import DataFacts, by_regions_stages, topk_by_regions
from sparcel.cost import Counts, Problem, count, default_rates, predict
from sparcel.formats import format_named
from sparcel.ops import SUM
from sparcel.schemes import stages_of
from sparcel.stages import Exchange, Stages, UnionSize
from sparcel.wire import Wire
from tests.sampling import meeting

oktopk_module = sys.modules["sparcel.collectives.oktopk"]  # the package has the function

COLLECTIVES: dict[str, Callable] = {
    **{
        name: lambda stream, comm, k, name=name: ALGORITHMS[name].reduce(stream, Wire(comm), SUM, k)
        for name in ALGORITHMS
    },
    "gtopk": lambda stream, comm, k: gtopk(stream, Wire(comm), k),
    "gathered_topk": lambda stream, comm, k: gathered_topk(stream, Wire(comm), k, k),
    "all_gather": lambda stream, comm, k: sparcel.all_gather(stream, comm),
    "reduce_scatter": lambda stream, comm, k: sparcel.reduce_scatter(stream, group=comm),
    "broadcast": lambda stream, comm, k: sparcel.broadcast(stream, 0, comm),
}
STAGES: dict[str, Stages] = {
    **{name: algorithm.stages for name, algorithm in ALGORITHMS.items()},
    **OTHER_STAGES,
}
WORLDS = [1, 2, 3, 5, 6, 8, 9, 16, 33]


def evenly(layout: str, ranks: int, size: int, k: int) -> list[torch.Tensor]:
    """Return each rank's indices, k at about equal distances: the same ones, or interleaved."""
    spacing = size // k
    assert spacing >= ranks
    shift = 1 if layout == "disjoint" else 0
    return [torch.arange(k) * spacing + shift * rank for rank in range(ranks)]


def anywhere(ranks: int, size: int, k: int, seed: int = 0) -> list[torch.Tensor]:
    """Return k indices for each rank, drawn independently."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(size, generator=generator)[:k].sort().values for _ in range(ranks)]


def streams_at(indices: Sequence[torch.Tensor], size: int) -> list[SparseStream]:
    """Return streams at these indices, with values whose sums are never zero."""
    return [
        SparseStream(own, 1.0 + (own * (rank + 3)) % 61, size) for rank, own in enumerate(indices)
    ]


def union_of(indices: Sequence[torch.Tensor], size: int) -> UnionSize:
    """Return a `Problem.union` function for known indices."""
    stored = np.zeros((len(indices), size), bool)
    for rank, own in enumerate(indices):
        stored[rank, own.numpy()] = True

    @cache
    def counted(ranks: tuple[int, ...], start: int, stop: int) -> int:
        return int(stored[list(ranks), start:stop].any(axis=0).sum())

    return lambda ranks, start, stop: counted(tuple(ranks), start, stop)


def run(call: Callable, streams: Sequence[SparseStream], k: int) -> tuple[list[Counts], int]:
    """Return each rank's counters, and the rounds."""
    report = simulate(len(streams), lambda comm: call(streams[comm.rank], comm, k), latency_s=1)
    counted = [
        Counts(t.messages_sent, t.bytes_sent, t.messages_received, t.bytes_received, 0)
        for t in report.traffic
    ]
    return counted, round(report.seconds)


def check(name: str, indices: Sequence[torch.Tensor], size: int, stages: Stages) -> None:
    """Check each rank's messages and bytes, and the rounds, of streams at these indices."""
    ranks, k = len(indices), len(indices[0])
    counted, rounds = run(COLLECTIVES[name], streams_at(indices, size), k)
    problem = Problem(size, k, ranks, union=union_of(indices, size))
    for rank in range(ranks):
        told = count(stages, replace(problem, rank=rank))
        assert told[:4] == counted[rank][:4], (rank, told, counted[rank])
    assert count(stages, problem).rounds == rounds


def test_every_collective_is_compared() -> None:
    assert set(STAGES) - {"oktopk"} == set(COLLECTIVES)


@pytest.mark.parametrize(
    ("name", "place"), meeting(COLLECTIVES, product(WORLDS, ["identical", "disjoint"]), each=10)
)
def test_evenly_spread_indices_have_the_predicted_traffic(
    name: str, place: tuple[int, str]
) -> None:
    """Sizes and counts need not be divisible by P; some sums stay sparse, others become dense."""
    ranks, layout = place
    size, k = (37 * ranks + 11, 13) if ranks % 2 else (7 * ranks * 29 + 3, 29)
    check(name, evenly(layout, ranks, size, min(k, size // ranks)), size, STAGES[name])


@pytest.mark.parametrize("name", COLLECTIVES)
@given(st.sampled_from(WORLDS[:-1]), st.integers(1, 900), st.integers(1, 60), st.integers(0, 99))
def test_known_indices_have_the_predicted_traffic(
    name: str, ranks: int, size: int, k: int, seed: int
) -> None:
    # A single coordinate can decide whether a vector or a part of it is dense.
    k = min(k, max(1, size // 20))
    check(name, anywhere(ranks, size, k, seed), size, STAGES[name])


@pytest.mark.parametrize(
    ("name", "given"),
    meeting(
        COLLECTIVES,
        [(100_000, 6_000, 3), (400_000, 4_000, 8), (300_000, 60_000, 8), (400_000, 8_000, 13)],
        each=2,
    ),
)
def test_expected_bytes_of_independent_indices_differ_by_their_spread(
    name: str, given: tuple[int, int, int]
) -> None:
    """A message holds a count of coordinates that somebody drew, whose variance is below its mean.

    So the bytes of messages with m₁, m₂, … entries deviate by at most Σ√mᵢ entries, at 8 bytes, or
    by their padding. Five deviations are allowed.
    """
    size, k, ranks = given
    found, rounds = run(COLLECTIVES[name], streams_at(anywhere(ranks, size, k), size), k)
    problem = Problem(size, k, ranks)
    told = count(STAGES[name], problem)
    exchanges = [stage for stage in STAGES[name](problem) if isinstance(stage, Exchange)]
    for way in ("sent", "received"):
        messages = [
            nbytes for stage in exchanges for nbytes in (stage.sends, stage.receives)[way != "sent"]
        ]
        spread = sum(5 * 8 * sqrt(nbytes / 8) + 16 for nbytes in messages)
        difference = getattr(told, f"bytes_{way}") - getattr(found[0], f"bytes_{way}")
        assert abs(difference) <= spread
    assert told.rounds == rounds


@pytest.mark.parametrize(("size", "k", "ranks"), [(1_000_000, 20_000, 8), (1_000_000, 40_000, 16)])
def test_expected_bytes_of_oktopk_are_near(size: int, k: int, ranks: int) -> None:
    """It also expects how its data refine boundaries and select: within 4 % for normal values."""
    draw = torch.Generator().manual_seed(1)
    given = [
        SparseStream(own, torch.randn(k, generator=draw), size) for own in anywhere(ranks, size, k)
    ]
    found, _ = run(lambda stream, comm, k: oktopk(stream, Wire(comm), k, k), given, k)
    volume = max(max(one.bytes_sent, one.bytes_received) for one in found)
    told = predict(STAGES["oktopk"], Problem(size, k, ranks)).bytes
    assert told == pytest.approx(volume, rel=0.04)


def test_expected_bytes_of_a_step_of_oktopk_are_near() -> None:
    """Within 4 % too, although a rank sends no entries of its own region, but others instead."""
    size, k, ranks = 1_000_000, 20_000, 8

    def on_rank(comm):
        gradient = torch.randn(size, generator=torch.Generator().manual_seed(comm.rank))
        scheme("oktopk", density=k / size).step(gradient, comm)
        return max(comm.traffic.bytes_sent, comm.traffic.bytes_received)

    told = predict(stages_of("oktopk", default_rates()), Problem(size, k, ranks)).bytes
    assert told == pytest.approx(max(simulate(ranks, on_rank).results), rel=0.04)


def test_a_format_shortens_what_crosses_nodes_and_nothing_inside():
    size, ranks = 100_000, 4

    def on_rank(comm):
        comm.grid(2)
        before = comm.traffic.bytes_sent
        gradient = torch.randn(size, generator=torch.Generator().manual_seed(comm.rank))
        scheme("hitopk", density=0.01, ranks_per_node=2, format="packed:4").step(gradient, comm)
        return comm.traffic.bytes_sent - before

    problem = Problem(size, size // 100, ranks, 2, format=format_named("packed:4"))
    told = predict(stages_of("hitopk", default_rates()), problem).bytes
    assert told == pytest.approx(max(simulate(ranks, on_rank).results), rel=0.04)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("dense", "gtopk", "scalecom", "torus2d")),
        ("torus2d", torch.float16),
    ],
)
def test_whole_steps_send_what_their_steps_say(name: str, dtype: torch.dtype, ranks: int) -> None:
    """ScaleCom's rank 0 leads in the first step. Nodes tell each other where they are before it."""
    size, k = 6007, 61
    nodes = next(count for count in (2, 3, 1) if ranks % count == 0)
    settings = {"torus2d": {"ranks_per_node": nodes}, "dense": {}}.get(name, {"density": 0.01})

    def on_rank(comm):
        comm.grid(nodes)
        before = replace(comm.traffic)
        gradient = ((1.0 + torch.arange(float(size))) / size * (1 + comm.rank)).to(dtype)
        scheme(name, **settings).step(gradient, comm)
        after = comm.traffic
        return (
            after.bytes_sent - before.bytes_sent,
            after.bytes_received - before.bytes_received,
        )

    results = simulate(ranks, on_rank).results
    here = nodes if name == "torus2d" else 1
    problem = Problem(size, k, ranks, here, dtype.itemsize, spread=k)
    for rank in range(ranks):
        told = count(stages_of(name, default_rates()), replace(problem, rank=rank))
        assert (told.bytes_sent, told.bytes_received) == results[rank]


class Recorder:
    """Records the refinements of a run: the facts that collectives by regions decide by."""

    def __init__(self, patch: pytest.MonkeyPatch, ranks: int) -> None:
        self.ranks = ranks
        self.counts: dict[str, dict[int, list[torch.Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.listed: dict[int, int] = {}
        self.boundaries: list[int] = []
        self.winners: list[int] = []
        for kind, module in (("boundaries", regions_module), ("histograms", global_topk_module)):
            patch.setattr(module, "sum_counts", partial(self._sum, module.sum_counts, kind))
        gather = partial(self._gather, global_topk_module.gather_integers)
        patch.setattr(global_topk_module, "gather_integers", gather)
        split = partial(self._split, oktopk_module.balanced_boundaries)
        patch.setattr(oktopk_module, "balanced_boundaries", split)
        select = partial(self._select, oktopk_module.global_topk)
        patch.setattr(oktopk_module, "global_topk", select)

    def _sum(self, own, kind, counts, comm, *rest):
        self.counts[kind][comm.rank].append(counts)
        return own(counts, comm, *rest)

    def _gather(self, own, numbers, comm, *rest):
        self.listed[comm.rank] = numbers.numel()
        return own(numbers, comm, *rest)

    def _split(self, own, *arguments):
        self.boundaries, finite = own(*arguments)
        return self.boundaries, finite

    def _select(self, own, *arguments):
        winners = own(*arguments)
        self.winners = winners.counts
        return winners

    def facts(self) -> DataFacts:
        return DataFacts(
            self._counted("boundaries"),
            self.boundaries,
            self._counted("histograms"),
            [self.listed[rank] for rank in range(self.ranks)],
            self.winners,
        )

    def _counted(self, kind: str) -> list[Counted]:
        by_rank = [self.counts[kind][rank] for rank in range(self.ranks)]
        return [counted(counts) for counts in zip(*by_rank, strict=True)]


def counted(counts: Sequence[torch.Tensor]) -> Counted:
    """Return the `Counted` of these counts."""
    places = [own.nonzero().squeeze(1) for own in counts]
    occupied = [int(at[-1] - at[0]) + 1 if at.numel() else 0 for at in places]
    size = counts[0].numel()
    return Counted(size, occupied, union_of(places, size))


def moved_by(problem: Problem, facts: DataFacts) -> int:
    """Return how many messages the rank sends or receives to even out; 0 if no rank does."""
    taken = list(by_regions_stages(problem, facts))
    evening = [
        stage for stage in taken if isinstance(stage, Exchange) and stage.pattern == "rotate"
    ]
    return evening[-1].rounds if len(evening) > 1 else 0


@pytest.mark.parametrize(
    ("ranks", "kind"),
    meeting(WORLDS, product([3, 300], ["identical", "disjoint", "anywhere"]), each=2),
)
def test_oktopk_has_the_predicted_traffic_given_its_refinements(
    ranks: int, kind: tuple[int, str]
) -> None:
    k, layout = kind
    size = 40 * ranks * k // 7 + 5
    indices = anywhere(ranks, size, k) if layout == "anywhere" else evenly(layout, ranks, size, k)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, ranks)
        call = lambda stream, comm, k: topk_by_regions(stream, Wire(comm), k, k)  # noqa: E731
        found, rounds = run(call, streams_at(indices, size), k)
        facts = recorder.facts()
    problem = Problem(size, k, ranks, union=union_of(indices, size))
    told = [
        count(partial(by_regions_stages, facts=facts), replace(problem, rank=rank))
        for rank in range(ranks)
    ]
    assert [one[:4] for one in told] == [one[:4] for one in found]
    # If a rank moves several pieces to even out the winners, other ranks wait for it.
    waiting = max(moved_by(replace(problem, rank=rank), facts) for rank in range(ranks))
    longest = max(one.rounds for one in told)
    assert longest <= rounds <= longest + waiting


@pytest.mark.parametrize(("ranks", "k"), [(1, 5), (2, 500), (3, 200), (8, 100), (17, 20), (33, 9)])
def test_oktopk_has_the_predicted_traffic_for_little_data(ranks: int, k: int) -> None:
    size = 100 * k
    indices = anywhere(ranks, size, k)
    call = lambda stream, comm, k: oktopk(stream, Wire(comm), k, k)  # noqa: E731
    found, rounds = run(call, streams_at(indices, size), k)
    problem = Problem(size, k, ranks, union=union_of(indices, size))
    for rank in range(ranks):
        assert count(STAGES["oktopk"], replace(problem, rank=rank))[:4] == found[rank][:4]
    assert count(STAGES["oktopk"], problem).rounds == rounds
