"""Particular properties of the selectors that the benchmarks have, and schemes that use them."""

from functools import partial

import pytest
import torch

import sparcel
from benchmarks.streams.paper_selectors import DoubleSampling, GaussianK
from sparcel.core.comm import Communicator
from sparcel.core.selectors import overlap, topk
from sparcel.errors import MismatchError

# Gaussian-k


def test_gaussiank_selects_the_share_of_a_normal_distribution() -> None:
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    assert abs(GaussianK().select(3 * x, 4000).nnz - 4000) < 200


def test_gaussiank_lowers_its_threshold_for_heavy_tails_and_caps_light_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    heavy = torch.empty(100_000).cauchy_(generator=generator)
    assert 750 < GaussianK().select(heavy, 1000).nnz <= 1334
    light = torch.ones(100_000)
    assert GaussianK().select(light, 1000).nnz == 1334
    estimate = GaussianK(factor=None)
    assert estimate.select(heavy, 1000).nnz < 100
    assert estimate.select(light, 1000).nnz == 100_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussiank_finds_the_smallest_numbers(dtype: torch.dtype) -> None:
    """The threshold falls by hundreds of powers of ten, until a product rounds to itself."""
    x = torch.full(
        (1000,), torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, dtype=dtype
    )
    x[7] = torch.finfo(dtype).max
    assert (x > 0).all()
    assert GaussianK().select(x, 12).nnz == 16


# Double sampling


@pytest.mark.parametrize("k", [20, 400])
def test_double_sampling_does_not_starve_high_indices(k: int) -> None:
    """Taking the first k by index of all that pass the threshold would never reach the end."""
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    s, exact = DoubleSampling(), topk(x, k)
    for step in range(20):
        selected = s.select(x, k, step)
        assert overlap(exact, selected) == 1
        missing = exact.without(selected)
        assert missing.nnz <= k // 5
        if missing.nnz:  # only the smallest may be missing, at any index
            assert missing.values.abs().max() <= selected.values.abs().min()
    assert int(exact.indices.max()) > 30_000


def test_double_sampling_survives_a_sample_that_misleads() -> None:
    x = torch.zeros(100_000)
    x[::1000] = torch.arange(1.0, 101)  # a sample of 1 % sees none or few of them
    for step in range(10):
        assert 8 <= DoubleSampling().select(x, 10, step).nnz <= 10


def test_a_scheme_takes_a_selector_that_is_no_name() -> None:
    """As the benchmarks give it; all ranks must give the same."""
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0))

    def on_rank(comm: Communicator, rank_with_another: int | None) -> int:
        factor = 0.5 if comm.rank == rank_with_another else 0.9
        made = sparcel.scheme("topk", selector=GaussianK(factor), algorithm="allgather")
        return int((made.step(gradient, comm) != 0).sum())

    expected = GaussianK().select(gradient, 50).nnz
    assert sparcel.simulate(3, partial(on_rank, rank_with_another=None)).results == [expected] * 3
    with pytest.raises(MismatchError, match="GaussianK"):
        sparcel.simulate(3, partial(on_rank, rank_with_another=1))
