"""Properties of every selector, over sizes, counts, dtypes and distributions."""

import math
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from benchmarks.streams.paper_selectors import DoubleSampling, GaussianK
from sparcel.core import kernels
from sparcel.core.kernels import Addition
from sparcel.core.kernels.definitions import select as reference
from sparcel.core.selectors import (
    SELECTORS,
    Bucketed,
    Chunkwise,
    ExactTopK,
    RandomK,
    Selector,
    ThresholdReuse,
    selector,
)
from tests.kernels.paths import KINDS, Case
from tests.sampling import meeting
from tests.schemes.test_cost import Allocations
from tests.strategies import FLOATS, floats, same_bits

LENGTHS = [0, 1, 2, 3, 17, 100, 511, 512, 513, 2000, 70_001]
VARIANTS: list[Selector] = [
    *(selector(name) for name in SELECTORS),
    selector("bucketed", bucket=64),
    selector("bucketed", bucket=100, count=3),
    selector("chunkwise", m=4),
    selector("mstopk", samplings=3),
    selector("reuse", period=2),
    selector("randomk", seed=-3),
    GaussianK(),
    GaussianK(factor=0.5),
    GaussianK(factor=None),
    DoubleSampling(),
    DoubleSampling(sample=0.3, seed=7),
]
TOP = (ExactTopK, ThresholdReuse, GaussianK, DoubleSampling)
"""Their selected magnitudes are at least the others."""

names = st.sampled_from(list(SELECTORS))
variants = st.sampled_from(VARIANTS)
steps = st.integers(0, 100)


def finite(x: Tensor) -> Tensor:
    """Replace non-finite values, which large values become in float16."""
    limits = torch.finfo(x.dtype)
    return x.nan_to_num(1.0, limits.max, limits.min)


@st.composite
def vectors(draw: st.DrawFn, dtype: st.SearchStrategy[torch.dtype] = floats) -> Tensor:
    kind = draw(st.sampled_from([*KINDS, "huge"]))
    case = Case(
        "special" if kind == "huge" else kind,
        draw(st.sampled_from(LENGTHS)),
        draw(dtype),
        draw(st.integers(0, 99)),
        draw(st.booleans()),
    )
    return finite(case.vector())


def ks(length: int) -> st.SearchStrategy[int]:
    some = [1, 2, 3, length // 100, length // 10, length // 2, length - 1, length, length + 5]
    return st.sampled_from([k for k in some if k >= 1])


def bounds(s: Selector, x: Tensor, k: int) -> tuple[int, int]:
    """Return the fewest and most entries that the docstring allows in a selector's first step."""
    nnz = int((x != 0).sum())
    match s:
        case Bucketed() | Chunkwise():
            count, chunk = s.rule(k, x.numel())
            each = [int((part != 0).sum()) for part in x.split(chunk)] if x.numel() else []
            exactly = sum(min(count, there) for there in each)
            return exactly, exactly
        case GaussianK(factor=None):
            return 0, nnz
        case GaussianK():
            return min(nnz, 3 * k // 4 + 1), min(nnz, -(-4 * k // 3))
        case DoubleSampling():
            return min(nnz, -(-8 * k // 10)), min(nnz, k)
        case RandomK():
            return max(0, min(k, x.numel()) - (x.numel() - nnz)), min(nnz, k)
        case _:
            return min(k, nnz), min(k, nnz)


@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
@given(st.data(), vectors(), steps)
def test_selection_is_sorted_has_the_vectors_values_and_keeps_its_bounds(
    variant: Selector, data: st.DataObject, x: Tensor, step: int
) -> None:
    k = data.draw(ks(x.numel()))
    before = x.clone()
    stream = variant.fresh().select(x, k, step)
    assert same_bits(x, before)
    assert stream.indices is not None
    assert stream.finite
    assert stream.size == x.numel()
    assert (stream.dtype, stream.indices.dtype) == (x.dtype, torch.int32)
    assert kernels.check_indices(stream.indices, stream.size) == -1
    assert same_bits(stream.values, x[stream.indices.long()])
    assert (stream.values != 0).all()
    fewest, most = bounds(variant, x, k)
    assert fewest <= stream.nnz <= most <= variant.most(k, x.numel())
    if isinstance(variant, TOP) and stream.nnz:
        left = reference.magnitude_bits(x).clone()
        left[stream.indices.long()] = 0
        assert (reference.magnitude_bits(stream.values) >= left.max()).all()


@given(st.data(), variants, vectors(), steps)
def test_a_step_that_is_repeated_selects_the_same(
    data: st.DataObject, variant: Selector, x: Tensor, step: int
) -> None:
    k = data.draw(ks(x.numel()))
    s = variant.fresh()
    first, again = s.select(x, k, step), s.select(x, k, step)
    assert torch.equal(first.indices, again.indices)
    assert torch.equal(variant.fresh().select(x, k, step).indices, first.indices)


@given(
    st.data(), variants, vectors(), steps, st.sampled_from((torch.float32, torch.float64)), floats
)
def test_taking_is_adding_selecting_and_clearing(
    data: st.DataObject,
    variant: Selector,
    x: Tensor,
    step: int,
    wide: torch.dtype,
    narrow: torch.dtype,
) -> None:
    k = data.draw(ks(x.numel()))
    gradient = finite(x.to(narrow))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    memory = finite(x.to(wide))[torch.randperm(x.numel(), generator=generator)]
    scratch = torch.full_like(memory, torch.nan)
    kept = memory.clone(), gradient.clone()
    taken = variant.fresh().take(Addition(memory, gradient, scratch), k, step)
    assert same_bits(memory, kept[0])
    assert same_bits(gradient, kept[1])
    total = memory + gradient.to(wide)
    assert taken.finite is bool(total.isfinite().all())
    if not taken.finite:
        assert taken.nnz == 0
        return
    expected = variant.fresh().select(total, k, step)
    assert same_bits(taken.indices, expected.indices)
    assert same_bits(taken.values, expected.values)
    total[expected.indices.long()] = 0
    assert same_bits(scratch, total)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", SELECTORS)
def test_selection_of_a_non_finite_vector_is_void(name: str, bad: float) -> None:
    gradient, s = torch.randn(1000), selector(name)
    gradient[617] = bad
    stream = s.take(Addition(torch.zeros(1000), gradient, torch.empty(1000)), 20)
    assert not stream.finite
    assert stream.nnz == 0
    assert s.state_dict() == s.fresh().state_dict()


@pytest.mark.parametrize(
    ("name", "vector"),
    meeting(
        SELECTORS,
        product(FLOATS, ["normal", "all equal", "zeros", "mostly zero", "bunched"]),
        each=10,
    ),
    ids=str,
)
def test_selection_allocates_nothing_as_large_as_the_vector(
    name: str, vector: tuple[torch.dtype, str]
) -> None:
    """A mask of one byte a coordinate would already fail."""
    dtype, kind = vector
    size, k = 600_000, 600
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gradient = Case(kind, size, dtype).vector()
    memory, scratch, s = (
        torch.zeros(size, dtype=wide),
        torch.empty(size, dtype=wide),
        selector(name),
    )
    with Allocations(size, [memory, scratch, gradient]) as allocations:
        for step in (0, 1):
            s.take(Addition(memory, gradient, scratch), k, step)
            s.select(gradient, k, step)
    assert allocations.made == []


@given(st.data(), vectors())
def test_exact_is_the_reference(data: st.DataObject, x: Tensor) -> None:
    k = data.draw(ks(x.numel()))
    stream = selector("exact").select(x, k)
    indices, values = reference.topk(x, k)
    assert torch.equal(stream.indices, indices)
    assert same_bits(stream.values, values)


@given(st.data(), st.sampled_from(["bucketed", "chunkwise"]), vectors())
def test_chunks_are_the_reference(data: st.DataObject, name: str, x: Tensor) -> None:
    k, s = data.draw(ks(x.numel())), selector(name)
    assert torch.equal(s.select(x, k).indices, reference.topk_chunked(x, *s.rule(k, x.numel()))[0])


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 10))
def test_chunkwise_comes_close_to_k_from_below(k: int, size: int, m: int) -> None:
    k = min(k, size)
    most = Chunkwise(m).most(k, size)
    assert most <= k
    assert most >= k * (1 - k / (size * m)) - 2 * (m - 1)


@given(st.integers(1, 10**9), st.floats(1e-4, 1))
def test_buckets_come_close_to_k(size: int, density: float) -> None:
    k = max(1, round(density * size))
    count, bucket = Bucketed().rule(k, size)
    if size <= bucket:
        assert Bucketed().most(k, size) == k
    else:
        assert count == 1 or abs(count - bucket * k / size) <= 0.5


@pytest.mark.parametrize("density", [0.01, 0.4])
@pytest.mark.parametrize("size", [1_500, 5_000, 200_000, 25_000_000])
def test_buckets_are_those_of_sparcml(size: int, density: float) -> None:
    k = max(1, math.ceil(density * size))
    assert Bucketed().rule(k, size) == (round(512 * density), 512)
