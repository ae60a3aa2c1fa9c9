"""The volume of Ok-Topk is bounded in every call, for any entries."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import simulate
from sparcel.core.collectives import gathered_topk, oktopk
from sparcel.core.collectives.counting import TOLERANCE, TOLERATED, balanced_boundaries
from sparcel.core.collectives.oktopk import (
    direct_volume,
    evened_volume,
    gather_direct,
    gather_evened,
    moves_to_even,
    topk_by_regions,
)
from sparcel.core.formats import RAW, Lengths
from sparcel.core.wire import Wire
from tests.collectives.test_oktopk import LAYOUTS, VALUES, streams_of
from tests.collectives.test_traffic import evaluate, table
from tests.sampling import meeting
from tests.strategies import floats, same_stream

PARTS = table(["part of `oktopk`", "messages", "bytes, at most"])
STEPS = 4


def bound(column, ranks, size, count, value_bytes=4):
    """Return the bound of docs/explanation/algorithms.md: the sum of its parts."""
    return sum(evaluate(part[column], ranks, size, count, value_bytes) for part in PARTS.values())


def measured(steps, k, call=topk_by_regions):
    """Return the worst rank's volume and its messages in each step, from the ranks' counters."""

    def on_rank(comm):
        seen = [(0, 0, 0)]
        for streams in steps:
            call(streams[comm.rank], Wire(comm), k, k)
            traffic = comm.traffic
            seen.append((traffic.bytes_sent, traffic.bytes_received, traffic.messages_sent))
        return [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(seen)]

    by_step = zip(*simulate(len(steps[0]), on_rank).results, strict=True)
    return [
        (max(max(sent, received) for sent, received, _ in ranks), max(m for _, _, m in ranks))
        for ranks in by_step
    ]


def moving(layout, ranks, size, k):
    """Return the streams of several steps; indices come from a range that moves between steps."""
    return [streams_of(layout, "normal", ranks, size, k, seed=seed) for seed in range(STEPS)]


def check(layout, ranks, size, k, steps):
    for volume, messages in measured(moving(layout, ranks, size, k)[:steps], k):
        assert volume <= bound("bytes, at most", ranks, size, k)
        assert messages <= bound("messages", ranks, size, k)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 9, 16, 17])
def test_volume_is_bounded_in_every_step(ranks):
    for number, layout in enumerate(LAYOUTS):
        if number % 2 == ranks % 2:  # each meets half of the worlds
            check(layout, ranks, 30_000, 1_200, steps=STEPS if number % 3 == ranks % 3 else 1)


ALL = ("uniform", "in one region", "in one region", "identical")  # the region moves


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layouts"), [(32, ALL), (128, ALL[1:2])])
def test_volume_is_bounded_among_many_ranks(ranks, layouts):
    size, k = 200_000, 2_000
    steps = [
        streams_of(layout, "normal", ranks, size, k, seed=seed)
        for seed, layout in enumerate(layouts)
    ]
    for volume, messages in measured(steps, k):
        assert volume <= bound("bytes, at most", ranks, size, k)
        assert messages <= bound("messages", ranks, size, k)


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(VALUES),
    st.integers(1, 17),
    st.integers(1, 3000),
    st.integers(1, 300),
    floats,
    st.integers(0, 99),
)
def test_no_input_exceeds_the_bound(layout, kind, ranks, size, k, dtype, seed):
    streams = streams_of(layout, kind, ranks, size, k, dtype, seed)
    most = bound("bytes, at most", ranks, size, k, dtype.itemsize)
    for call in (topk_by_regions, oktopk):
        [(volume, _)] = measured([streams], k, call)
        assert volume <= most


@pytest.mark.parametrize(("layout", "ranks"), meeting(LAYOUTS, [4, 7, 16], each=1))
def test_total_volume_stays_below_the_papers_figures(layout, ranks):
    """Headers, boundaries and histograms fit into the slack that the bound has for k = 2·10⁴."""
    size, k = 1_000_000, 20_000
    [(volume, _)] = measured(moving(layout, ranks, size, k)[:1], k, oktopk)
    assert volume <= 4 * (2 * k + 4 * k * (ranks - 1) / ranks)
    if layout in ("uniform", "identical", "disjoint"):
        assert volume <= 4 * 6 * k * (ranks - 1) / ranks


@pytest.mark.parametrize(("ranks", "k"), [(2, 5000), (3, 500), (8, 100), (32, 20)])
def test_oktopk_gathers_if_that_costs_no_more(ranks, k):
    streams = streams_of("uniform", "normal", ranks, 50_000, k)
    gathered = measured([streams], k, gathered_topk)
    assert measured([streams], k, oktopk) == gathered
    [(volume, messages)] = measured([streams], k)
    assert gathered[0][0] <= volume + 4096  # the counts, which are often shorter than they may be
    assert gathered[0][1] < messages


@pytest.mark.parametrize(("ranks", "k"), [(3, 5000), (8, 1000), (32, 200)])
def test_oktopk_does_not_gather_if_that_costs_more(ranks, k):
    streams = streams_of("uniform", "normal", ranks, 50_000, k)
    [(volume, _)] = measured([streams], k, oktopk)
    assert measured([streams], k) == [(volume, _)]
    assert volume < measured([streams], k, gathered_topk)[0][0]


@given(st.sampled_from(LAYOUTS), st.integers(1, 17), st.integers(0, 99))
def test_regions_hold_equal_shares(layout, ranks, seed):
    streams = streams_of(layout, "normal", ranks, 20_000, 4_000, seed=seed)
    results = simulate(
        ranks, lambda comm: balanced_boundaries(streams[comm.rank], comm, None)
    ).results
    boundaries, finite = results[0]
    assert finite
    assert all(result == results[0] for result in results)
    assert boundaries == sorted(boundaries)
    assert (boundaries[0], boundaries[-1], len(boundaries)) == (0, 20_000, ranks + 1)
    indices = torch.cat([stream.indices for stream in streams])
    share = -(-indices.numel() // ranks)
    for start, stop in pairwise(boundaries):
        assert int(((indices >= start) & (indices < stop)).sum()) <= share + max(
            ranks, TOLERANCE, share // TOLERATED
        )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_pieces_even_out_the_ranks_entries(counts):
    total, ranks = sum(counts), len(counts)
    moves = moves_to_even(counts)
    assert [entry for start, stop, *_ in moves for entry in range(start, stop)] == list(
        range(total)
    )
    assert len(moves) <= 2 * ranks
    for rank, count in enumerate(counts):
        before = sum(counts[:rank])
        owned = [
            entry
            for start, stop, owner, _ in moves
            if owner == rank
            for entry in range(start, stop)
        ]
        assert owned == list(range(before, before + count))
        due = [
            entry
            for start, stop, _, target in moves
            if target == rank
            for entry in range(start, stop)
        ]
        assert due == list(range(rank * total // ranks, (rank + 1) * total // ranks))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=17), floats, st.integers(0, 60))
def test_savings_of_balancing_are_computed_exactly(counts, dtype, room):
    """Both gathers return the same winners, and take exactly the computed bytes."""
    boundaries = [0]
    for count in counts:
        boundaries.append(boundaries[-1] + count + room)
    blocks = [
        streams_of("uniform", "equal", 1, count + room, count, dtype, seed=room)[0]
        for count in counts
    ]
    wholes = [
        block.placed(start, boundaries[-1])
        for block, start in zip(blocks, boundaries[:-1], strict=True)
    ]
    ranks = len(counts)
    direct = simulate(
        ranks, lambda comm: gather_direct(blocks[comm.rank], counts, boundaries, Wire(comm))
    )
    evened = simulate(ranks, lambda comm: gather_evened(wholes[comm.rank], counts, Wire(comm)))
    for result in direct.results + evened.results:
        assert same_stream(result, direct.results[0])
    volumes = [max(traffic.volume for traffic in run.traffic) for run in (direct, evened)]
    lengths = Lengths(RAW, boundaries[-1], dtype.itemsize)
    assert volumes == [
        direct_volume(lengths, counts, boundaries),
        evened_volume(lengths, counts),
    ]
