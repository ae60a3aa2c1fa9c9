"""Ok-Topk returns the bits of an oracle that gathers everything, on the simulated cluster."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, simulate
from sparcel.core.collectives import gathered_topk, oktopk
from sparcel.core.collectives.oktopk import topk_by_regions
from sparcel.core.wire import Wire
from sparcel.errors import InputError
from tests.strategies import (
    FLOATS,
    case_of,
    floats,
    full,
    layouts,
    parts_of,
    same_bits,
    same_stream,
)

LAYOUTS = ("uniform", "identical", "disjoint", "in one region", "moving", "one rank", "uneven")
VALUES = ("normal", "few distinct", "equal", "ternary", "wide", "zeros")

CASES = (
    st.sampled_from(LAYOUTS),
    st.sampled_from(VALUES),
    st.integers(1, 17),
    st.integers(0, 400),
    st.integers(0, 60),
    st.integers(1, 60),
    floats,
    st.integers(0, 99),
)
"""Strategies for layout, values, ranks, size, entries, k, dtype and seed."""


def indices_of(layout, rank, world, size, count, generator, seed):
    """Return a rank's indices, arranged by ``layout``."""
    area, start = size, 0
    match layout:
        case "identical":
            return (torch.arange(count) * size) // max(count, 1)
        case "disjoint":
            return torch.arange(size)[rank::world][:count]
        case "in one region":
            area = min(size, max(count, size // (4 * world)))
            start = (size - area) * (seed % 4) // 3
        case "moving":
            area = min(size, max(count, size // 4))
            start = rank * (size - area) // world
        case "one rank":
            count = count if rank == world // 2 else 0
        case "uneven":
            count = min(size, count * rank // max(world - 1, 1))
    return start + torch.randperm(area, generator=generator)[:count].sort().values


def values_of(kind, count, dtype, generator):
    """Draw values of the given kind."""
    normal = torch.randn(count, generator=generator)
    match kind:
        case "few distinct":
            normal = (2 * normal).round()
        case "equal":
            normal = torch.ones(count)
        case "ternary":
            normal = normal.sign() * (normal.abs() > 0.6)
        case "wide":  # magnitudes from the subnormal to the largest
            normal = normal.sign() * torch.exp2(30 * torch.randn(count, generator=generator))
            normal = normal.clamp(-100, 100)
        case "zeros":
            normal = torch.zeros(count)
    return normal.to(dtype)


def streams_of(layout, kind, world, size, count, dtype=torch.float32, seed=0):
    """Return each rank's stream of at most ``count`` entries."""
    generator = torch.Generator().manual_seed(seed)
    streams = []
    for rank in range(world):
        indices = indices_of(layout, rank, world, size, min(count, size), generator, seed)
        values = values_of(kind, indices.numel(), dtype, generator)
        streams.append(SparseStream(indices, values, size))
    return streams


def outcomes(streams, k, max_nnz=None, call=topk_by_regions):
    return simulate(
        len(streams), lambda comm: call(streams[comm.rank], Wire(comm), k, max_nnz)
    ).results


def run(streams, k, max_nnz=None, call=topk_by_regions):
    return [outcome.total for outcome in outcomes(streams, k, max_nnz, call)]


def oracle(streams, k):
    return run(streams, k, call=gathered_topk)[0]


def check(streams, k, max_nnz=None):
    before = [parts_of(stream) for stream in streams]
    expected = oracle(streams, k)
    for result in run(streams, k, max_nnz) + run(streams, k, max_nnz, oktopk):
        assert same_stream(result, expected)
    for stream, (indices, values, _, finite) in zip(streams, before, strict=True):
        assert same_bits(stream.indices, indices)
        assert same_bits(stream.values, values)
        assert stream.finite == finite
    return expected


@given(*CASES, st.booleans())
def test_oktopk_has_the_bits_of_the_oracle(
    layout, kind, world, size, count, k, dtype, seed, bounded
):
    streams = streams_of(layout, kind, world, size, count, dtype, seed)
    check(streams, k, count if bounded else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_oktopk_has_the_bits_of_the_oracle_if_histograms_are_refined(layout, dtype):
    half = (LAYOUTS.index(layout) + FLOATS.index(dtype)) % 2  # each meets all kinds of values
    for world, kind in [*zip((2, 3, 5, 8, 3, 2), VALUES, strict=True)][half::2]:
        streams = streams_of(layout, kind, world, 20_000, 5_000, dtype)
        check(streams, 1_500, 5_000)


@given(layouts, st.integers(1, 17), st.integers(0, 70), st.integers(1, 80), floats)
def test_oktopk_takes_dense_streams_of_small_integers(layout, world, size, k, dtype):
    case = case_of(layout, world, size, dtype)
    expected = oracle(case.streams, k)
    for result in run(case.streams, k, call=oktopk):
        assert same_stream(result, expected)


@given(layouts, st.integers(1, 17), st.integers(0, 70), st.integers(1, 80), floats)
def test_total_and_what_ranks_drop_are_the_sum(layout, world, size, k, dtype):
    case = case_of(layout, world, size, dtype)
    every = sum(full(stream) for stream in case.streams)
    for call in (oktopk, topk_by_regions, gathered_topk):
        streams = case.streams
        if call is topk_by_regions:  # takes sparse ones
            streams = [stream.largest(size) for stream in streams]
        found = outcomes(streams, k, call=call)
        dropped = [outcome.dropped for outcome in found]
        assert torch.equal(full(found[0].total) + sum(map(full, dropped)), every)
        left = sum(int((one.values != 0).sum()) for one in dropped)
        assert left == max(int((every != 0).sum()) - k, 0)


def test_oracle_is_the_topk_of_the_sum():
    streams = streams_of("uniform", "few distinct", 5, 100, 30)
    total = sum(full(stream) for stream in streams)
    ranking = sorted(range(100), key=lambda i: (-abs(float(total[i])), i))[:12]
    kept = torch.zeros(100)
    kept[ranking] = total[ranking]
    for k in (12, 12 + int((total == 0).sum())):
        result = oracle(streams, k)
        assert not result.is_dense
        if k == 12:
            assert torch.equal(full(result), kept)
        assert result.nnz == min(k, int((total != 0).sum()))


def test_all_win_if_there_are_fewer_nonzeros_than_k():
    result = check(streams_of("uniform", "ternary", 7, 300, 20), 2000)
    assert 0 < result.nnz < 2000
    assert bool((result.values != 0).all())


def test_more_ties_than_candidates_are_gathered():
    """More ties than `few` remain after all bits are resolved; the lowest indices win."""
    streams = streams_of("disjoint", "equal", 4, 40_000, 10_000)
    assert check(streams, 12_345).indices.tolist() == list(range(12_345))


def test_indices_beyond_float32_and_int32():
    for size in (2**24 + 77, 2**31 - 1, 2**31, 2**40 + 3):
        last = torch.arange(size - 40, size)
        streams = [
            SparseStream(last[rank::2], torch.arange(1.0, 1 + last[rank::2].numel()), size)
            for rank in range(5)
        ]
        result = check(streams, 25, 20)
        assert result.nnz == 25
        assert int(result.indices[-1]) == size - 1


@pytest.mark.parametrize("world", range(1, 10))
def test_finite_flag_of_any_rank_voids_the_result(world):
    for culprit in range(world):
        streams = streams_of("uniform", "normal", world, 200, 20)
        streams[culprit].finite = False
        for result in run(streams, 20):
            assert not result.finite
            assert result.nnz == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_non_finite_sum_has_no_winners(world, poison):
    for culprit in range(world):
        streams = streams_of("uniform", "normal", world, 200, 20)
        streams[culprit].values[7] = poison
        for result in run(streams, 20):
            assert not result.finite
            assert result.nnz == 0


def test_overflowing_sum_is_not_finite():
    streams = [SparseStream(torch.arange(4), torch.full((4,), 3e38), 20) for _ in range(3)]
    assert not any(result.finite for result in run(streams, 2))
    assert not oracle(streams, 2).finite


@pytest.mark.parametrize("call", [oktopk, gathered_topk])
def test_integers_and_rows_are_refused(call):
    for values in (torch.ones(3, dtype=torch.int32), torch.ones(3, 2)):
        stream = SparseStream(torch.arange(3), values, 20)
        with pytest.raises(InputError, match="scalar float values"):
            simulate(2, lambda comm: call(stream, Wire(comm), 3))  # noqa: B023
