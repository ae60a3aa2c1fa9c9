"""Selection from long vectors: exact, the same in each run, and beyond 2³¹ entries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparcel.core.kernels import Addition, accumulate_topk, topk
from tests.gpu.cuda import GPU, needs_gpu
from tests.strategies import FLOATS, same_bits

pytestmark = needs_gpu

RUNS = 10
BEYOND = 2**31 + 100_003


def normal(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return torch.randn(size, generator=generator, device=GPU, dtype=torch.float32).to(dtype)


def assert_largest(x: Tensor, indices: Tensor, values: Tensor, k: int) -> None:
    """Check that these are the k largest entries, and of equal ones the first."""
    places = indices.long()
    assert indices.numel() == k
    assert bool((places.diff() > 0).all())
    assert same_bits(x[places].cpu(), values.cpu())
    left = x.abs()
    lowest = left[places].min()
    last = int(places[left[places] == lowest].max())
    left[places] = 0
    assert bool(left.max() <= lowest)
    assert not (left[:last] == lowest).any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1_000, 262_145, 3_000_001, 2**24 + 5])
def test_selection_is_that_of_torch_in_each_of_ten_runs(size: int, dtype: torch.dtype) -> None:
    x, k = normal(size, dtype), size // 50
    indices, values = topk(x, k)
    assert_largest(x, indices, values, k)
    expected = x.abs().topk(k).values
    assert torch.equal(values.abs().sort(descending=True).values, expected)
    for _ in range(RUNS - 1):
        again = topk(x, k)
        assert torch.equal(again[0], indices)
        assert torch.equal(again[1], values)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_selected_from_alike_in_each_of_ten_runs(dtype: torch.dtype) -> None:
    size, k, wide = 3_000_001, 30_000, torch.promote_types(dtype, torch.float32)
    memory, gradient = normal(size, wide, 1), normal(size, dtype, 2)
    runs = []
    for _ in range(RUNS):
        scratch = torch.empty_like(memory)
        runs.append((*accumulate_topk(Addition(memory, gradient, scratch), k), scratch))
    indices, values, finite, scratch = runs[0]
    total = memory + gradient
    assert bool(finite)
    assert_largest(total, indices, values, k)
    total[indices.long()] = 0
    assert torch.equal(scratch, total)
    for again in runs[1:]:
        assert all(
            torch.equal(one, other) for one, other in zip(again[:2], runs[0][:2], strict=True)
        )
        assert torch.equal(again[3], scratch)


def room_for(nbytes: int) -> None:
    """Skip the test unless the GPU has so much memory left."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(GPU)
    if free < nbytes:
        pytest.skip(f"needs {nbytes / 2**30:.0f} GiB of the GPU, {free / 2**30:.0f} are free")


def planted(places: Tensor) -> Tensor:
    """Return a vector of noise below 1, with multiples of 4 at these places."""
    x = torch.empty(BEYOND, dtype=torch.float16, device=GPU)
    for part in x.split(2**28):
        part.uniform_(-0.5, 0.5)
    x[places] = (4 * (1 + torch.arange(places.numel(), device=GPU) % 1_000)).to(x.dtype)
    x[places[::2]] *= -1
    return x


def far_places(count: int) -> Tensor:
    """Return places in all of the vector, in order; some lie beyond 2³¹."""
    drawn = torch.randint(BEYOND, (count,), generator=torch.Generator().manual_seed(3))
    ends = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 1, BEYOND - 1])
    return torch.cat([drawn, ends]).unique().to(GPU)


def test_topk_beyond_2_to_the_31st() -> None:
    room_for(14 * 2**30)
    places = far_places(5_000)
    x = planted(places)
    indices, values = topk(x, places.numel())
    assert indices.dtype == torch.int64
    assert torch.equal(indices, places)
    assert torch.equal(values, x[places])
    again = topk(x, places.numel())
    assert torch.equal(again[0], indices)
    del values, again
    many = BEYOND // 1_000
    assert_largest(x, *topk(x, many), many)


def test_accumulate_beyond_2_to_the_31st() -> None:
    room_for(28 * 2**30)
    places = far_places(5_000)
    gradient = planted(places)
    memory = torch.zeros(BEYOND, device=GPU)
    memory[places] = 1
    scratch = torch.empty_like(memory)
    indices, values, finite = accumulate_topk(Addition(memory, gradient, scratch), places.numel())
    assert bool(finite)
    assert torch.equal(indices, places)
    assert torch.equal(values, gradient[places].float() + 1)
    assert not scratch[places].any()
    for start in range(0, BEYOND, 2**28):
        stop = min(start + 2**28, BEYOND)
        rest = gradient[start:stop].float()
        inside = places[(places >= start) & (places < stop)] - start
        rest[inside] = 0
        assert torch.equal(scratch[start:stop], rest)
