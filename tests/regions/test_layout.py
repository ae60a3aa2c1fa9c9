"""Regions are blocks one after another, and legs ask for shares of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel.core.formats import RAW, format_named
from sparcel.core.kernels import Regions
from sparcel.core.kernels.definitions.regions import sampled_places, sampled_threshold
from sparcel.core.kernels.regions import LARGEST_BLOCK, SMALLEST_BLOCK
from sparcel.core.regions import leg
from tests.kernels.paths import Case
from tests.regions.made import KINDS, SIZES, ranges

sizes = st.sampled_from(SIZES) | st.integers(0, 5000)
ranks_ = st.integers(1, 17)
formats_ = st.sampled_from(["raw", "packed", "packed:4", "packed:2", "raw:bfloat16"])


def owned(regions: Regions, rank: int) -> torch.Tensor:
    """Return the coordinates of a region, by the definition: block b is of rank b mod P."""
    every = torch.arange(regions.size)
    return every[every.div(regions.block, rounding_mode="floor") % regions.ranks == rank]


@given(sizes, ranks_)
def test_regions_are_interleaved_blocks(size: int, ranks: int) -> None:
    regions = Regions.of(size, ranks)
    assert SMALLEST_BLOCK <= regions.block <= LARGEST_BLOCK
    assert regions.block & (regions.block - 1) == 0
    vector = torch.randn(size)
    covered = torch.zeros(size, dtype=torch.int)
    for rank in range(ranks):
        mine = owned(regions, rank)
        covered[mine] += 1
        assert regions.length(rank) == mine.numel()
        for end in {0, min(regions.block, size), size // 3, size // 2, max(size - 1, 0), size}:
            assert regions.before(rank, end) == int((mine < end).sum())
        assert torch.equal(regions.take(vector, rank), vector[mine])
        assert torch.equal(regions.coordinates(rank, torch.arange(mine.numel())), mine)
        other, expected = torch.zeros(size), torch.zeros(size)
        regions.put(other, rank, vector[mine])
        expected[mine] = vector[mine]
        assert torch.equal(other, expected)
        if ranks > 1:
            elsewhere = torch.arange(size - mine.numel())
            rest = torch.ones(size, dtype=torch.bool)
            rest[mine] = False
            assert torch.equal(regions.elsewhere(rank, elsewhere), rest.nonzero().flatten())
    assert bool((covered == 1).all())


@given(sizes, ranks_)
def test_all_ranks_own_about_as_much(size: int, ranks: int) -> None:
    regions = Regions.of(size, ranks)
    lengths = [regions.length(rank) for rank in range(ranks)]
    assert sum(lengths) == size
    assert max(lengths) - min(lengths) <= regions.block
    # From where blocks are as short as they get, the largest region is at most a sixteenth longer.
    if size >= 16 * ranks * SMALLEST_BLOCK:
        assert max(lengths) - min(lengths) <= size / ranks / 16


@given(st.data(), sizes, ranks_, formats_)
def test_a_phase_asks_for_the_shares_of_each_region(
    data: st.DataObject, size: int, ranks: int, name: str
) -> None:
    regions, format = Regions.of(size, ranks), format_named(name)
    densities = st.sampled_from([0.001, 0.1, 0.5, 1.0])
    shares = tuple((stop, data.draw(densities)) for _, stop in data.draw(ranges(size)))
    made = leg(regions, shares, format, torch.float32)
    asked = 0
    for rank in range(ranks):
        mine, first, wanted = owned(regions, rank), 0, 0.0
        for stop, density in shares:
            wanted += density * int(((mine >= first) & (mine < stop)).sum())
            first = stop
        asked += wanted
        if made.dense:
            assert made.expected[rank] == made.most[rank] == mine.numel()
        else:
            assert wanted - 1e-6 <= made.expected[rank] <= wanted + len(shares)
            assert made.expected[rank] <= made.most[rank] <= mine.numel()
        longest = format.nbytes(made.most[rank], mine.numel(), 4)
        assert made.bounds[rank] == longest or made.dense
    if made.dense:
        assert asked + ranks * len(shares) >= format.dense_from(max(1, size), 4)
    else:
        assert asked < format.dense_from(max(1, size), 4)


def test_shares_of_all_travel_dense() -> None:
    regions = Regions.of(10_000, 3)
    for format in (RAW, format_named("packed:4")):
        assert leg(regions, ((10_000, 1.0),), format, torch.float32).dense
        assert not leg(regions, ((10_000, 0.1),), format, torch.float32).dense


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_samples_are_spread_evenly(count: int, step: int) -> None:
    """Few places of a sample are the same, and each eighth of the vector has its part."""
    places = sampled_places(count, step, torch.device("cpu"))
    assert places.numel() == min(count, max(1024, min(8192, count // 64)))
    if count == 0:
        return
    assert int(places.min()) >= 0
    assert int(places.max()) < count
    if places.numel() < count:
        assert places.unique().numel() >= 0.8 * places.numel()
        parts = torch.bincount(places * 8 // count, minlength=8) / places.numel()
        assert float((parts - 1 / 8).abs().max()) < 0.02


@pytest.mark.parametrize("density", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("kind", ["normal", "cauchy", "ascending"])
def test_about_the_density_reaches_a_sampled_threshold(density: float, kind: str) -> None:
    size, off = 300_000, []
    x = Case(kind, size, torch.float32, 3).vector()
    for step in range(20):
        sample = x[sampled_places(size, step, x.device)]
        reached = x.view(torch.int32).bitwise_and(0x7FFFFFFF) >= sampled_threshold(sample, density)
        off.append(float(reached.float().mean()) / density - 1)
    errors = torch.tensor(off)
    # Of a sample of 4687, 1 % are 47: their number is 15 % off, in the mean, and not biased.
    expected = ((1 - density) / (density * 4687)) ** 0.5
    assert float(errors.abs().mean()) < 1.5 * expected
    assert abs(float(errors.mean())) < expected


@given(st.sampled_from(KINDS), st.integers(0, 1024), st.sampled_from([0.001, 0.1, 0.5, 1.0]))
def test_thresholds_of_few_coordinates_are_exact(kind: str, size: int, density: float) -> None:
    x = Case(kind, size, torch.float32, 5).vector()
    sample = x[sampled_places(size, 7, x.device)]
    limit = int(sampled_threshold(sample, density))
    assert limit > 0
    bits = x.view(torch.int32).bitwise_and(0x7FFFFFFF)
    count = max(1, int(density * size + 0.5))
    assert size == 0 or int((bits >= limit).sum()) >= min(count, int((bits > 0).sum()))
    assert int((bits > limit).sum()) < max(count, 1)
