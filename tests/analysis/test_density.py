"""Expected densities, against exact arithmetic and enumeration."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, simulate
from sparcel.core.collectives.all_reduce import split_allgather
from sparcel.core.comm import Communicator
from sparcel.core.stream import dense_from
from sparcel.core.wire import Wire
from sparcel.errors import InputError
from sparcel.tools.analysis import (
    delta,
    expected_nnz,
    nnz_variance,
    ranks_until_dense,
    relative_volume,
)
from tests.strategies import DTYPES


@st.composite
def settings(draw: st.DrawFn) -> tuple[int, int, int]:
    size = draw(st.integers(1, 60))
    return size, draw(st.integers(0, size)), draw(st.integers(1, 12))


def distribution(size: int, k: int, ranks: int) -> dict[int, Fraction]:
    """Return the exact distribution of nnz; each rank adds a hypergeometric number of new ones."""
    current = {k: Fraction(1)}
    for _ in range(ranks - 1):
        following: dict[int, Fraction] = {}
        for nnz, probability in current.items():
            for new in range(max(0, k - nnz), min(k, size - nnz) + 1):
                ways = math.comb(size - nnz, new) * math.comb(nnz, k - new)
                share = probability * Fraction(ways, math.comb(size, k))
                following[nnz + new] = following.get(nnz + new, Fraction(0)) + share
        current = following
    return current


@pytest.mark.parametrize(("size", "k", "ranks"), [(4, 2, 3), (5, 1, 4), (5, 3, 3), (3, 3, 2)])
def test_expected_nnz_is_the_mean_over_all_selections(size: int, k: int, ranks: int) -> None:
    subsets = list(itertools.combinations(range(size), k))
    counts = [len(set().union(*chosen)) for chosen in itertools.product(subsets, repeat=ranks)]
    mean = Fraction(sum(counts), len(counts))
    variance = Fraction(sum(c * c for c in counts), len(counts)) - mean**2
    assert expected_nnz(size, k, ranks) == pytest.approx(float(mean), rel=1e-14)
    assert nnz_variance(size, k, ranks) == pytest.approx(float(variance), rel=1e-12, abs=1e-12)
    assert distribution(size, k, ranks) == {
        nnz: Fraction(counts.count(nnz), len(counts)) for nnz in sorted(set(counts))
    }


@given(settings())
def test_expectation_and_variance_equal_the_exact_distribution(
    setting: tuple[int, int, int],
) -> None:
    size, k, ranks = setting
    exact = distribution(size, k, ranks)
    mean = sum(nnz * p for nnz, p in exact.items())
    variance = sum((nnz - mean) ** 2 * p for nnz, p in exact.items())
    assert expected_nnz(size, k, ranks) == pytest.approx(float(mean), rel=1e-13)
    assert nnz_variance(size, k, ranks) == pytest.approx(float(variance), rel=1e-9, abs=1e-11)


@given(settings())
def test_expected_nnz_is_the_papers_alternating_sum(setting: tuple[int, int, int]) -> None:
    size, k, ranks = setting
    share = Fraction(k, size)
    papers = size * sum(
        (-1) ** (i - 1) * math.comb(ranks, i) * share**i for i in range(1, ranks + 1)
    )
    assert expected_nnz(size, k, ranks) == pytest.approx(float(papers), rel=1e-13)


@pytest.mark.parametrize(("size", "k", "ranks"), [(10**6, 10**4, 64), (10**7, 10**5, 2)])
def test_the_variance_of_large_vectors(size: int, k: int, ranks: int) -> None:
    absent = Fraction(size - k, size) ** ranks
    both = Fraction((size - k) * (size - k - 1), size * (size - 1)) ** ranks
    exact = size * absent + size * (size - 1) * both - (size * absent) ** 2
    assert nnz_variance(size, k, ranks) == pytest.approx(float(exact), rel=1e-9)


@given(st.lists(st.fractions(0, 1), min_size=1, max_size=20), st.integers(1, 30))
def test_no_distribution_fills_in_faster_than_uniform(shares: list[Fraction], ranks: int) -> None:
    size, k = len(shares), sum(shares)
    # k is a whole number, so both distributions select equally many coordinates on average.
    shares = [share * Fraction(math.floor(k), 1) / k if k else share for share in shares]
    expected = float(sum(1 - (1 - share) ** ranks for share in shares))
    assert expected <= expected_nnz(size, math.floor(k), ranks) * (1 + 1e-12) + 1e-12


@given(st.integers(1, 10**18), st.data(), st.integers(1, 10**12))
def test_expected_nnz_is_bounded_and_grows_with_ranks_and_k(
    size: int, data: st.DataObject, p: int
) -> None:
    k = data.draw(st.integers(0, size))
    expected = expected_nnz(size, k, p)
    roundings = 1 + 1e-12
    assert k / roundings <= expected <= min(p * k, size) * roundings
    assert expected <= expected_nnz(size, k, p + 1) * roundings
    assert expected <= expected_nnz(size, min(k + 1, size), p) * roundings
    assert 0 <= nnz_variance(size, k, p) <= expected * roundings


def test_all_of_a_size_that_is_no_float_may_be_selected() -> None:
    size = 2**53 + 3
    assert expected_nnz(size, size, 2) == float(size)


@pytest.mark.parametrize(
    ("size", "k", "ranks"),
    [(10**12, 1, 10**6), (10**12, 1, 2), (10**12, 10**12 - 1, 2), (7, 6, 50), (10**9, 10**6, 4096)],
)
def test_large_settings_lose_no_digits(size: int, k: int, ranks: int) -> None:
    if ranks <= 4096:
        exact = float(size * (1 - (1 - Fraction(k, size)) ** ranks))
    else:  # the first four terms; the next is below 10⁻²⁶ of the sum
        share = Fraction(k, size)
        exact = float(
            size * sum((-1) ** (i - 1) * math.comb(ranks, i) * share**i for i in range(1, 5))
        )
    assert expected_nnz(size, k, ranks) == pytest.approx(exact, rel=2e-15)


@given(st.integers(1, 2**33), st.data(), st.sampled_from(DTYPES))
def test_delta_is_where_streams_turn_dense(
    size: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    nnz = data.draw(st.integers(0, size))
    assert (nnz >= dense_from(size, dtype.itemsize)) == (nnz > delta(size, dtype))


@given(st.integers(1, 10**12), st.data(), st.sampled_from(DTYPES))
def test_a_sum_turns_dense_at_the_first_such_world(
    size: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    k = data.draw(st.integers(1, size))
    ranks = ranks_until_dense(size, k, dtype)
    assert expected_nnz(size, k, ranks) > delta(size, dtype)
    assert ranks == 1 or expected_nnz(size, k, ranks - 1) <= delta(size, dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 1), "size must be at least 1, got 0"),
        ((10, 11, 1), r"k must lie in \[0, 10\], got 11"),
        ((10, -1, 1), r"k must lie in \[0, 10\], got -1"),
        ((10, 1, 0), "ranks must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    for function in (expected_nnz, nnz_variance):
        with pytest.raises(InputError, match=message):
            function(*arguments)


def test_ranks_until_dense_refuses_k_of_zero() -> None:
    with pytest.raises(InputError, match="an empty sum never turns dense"):
        ranks_until_dense(10, 0)


@pytest.mark.parametrize(("k", "world"), [(20, 2), (200, 4), (200, 8), (4000, 8)])
def test_relative_volume_is_what_the_collective_sends(k: int, world: int) -> None:
    size = 64_000

    def exchange(comm: Communicator) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        indices = torch.randperm(size, generator=generator)[:k].sort().values
        split_allgather(SparseStream(indices, torch.ones(k), size), Wire(comm), max_nnz=k)

    traffic = simulate(world, exchange).traffic
    # Each rank sends every other one a slice, and passes on its region, under headers of 40 bytes.
    sent = sum(t.bytes_sent for t in traffic) / world - 2 * 40 * (world - 1)
    dense = 2 * 4 * size * (world - 1) / world
    assert sent / dense == pytest.approx(relative_volume(size, k, world), rel=0.02, abs=0.002)


def test_dense_sum_takes_at_least_half_the_dense_volume() -> None:
    assert relative_volume(10**9, 10**7, 10**4) == pytest.approx(0.51)
    assert relative_volume(10**9, 10**9, 2) == 1
    with pytest.raises(InputError, match="one rank sends nothing"):
        relative_volume(10, 1, 1)
