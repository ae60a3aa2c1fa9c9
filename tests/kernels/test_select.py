"""Selection: every compiled path against the definition."""

from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.kernels.definitions import select as reference
from sparcel.errors import InputError
from tests.kernels.paths import ISAS, KINDS, LENGTHS, Case, cases, counts, isas, using
from tests.sampling import meeting
from tests.strategies import FLOATS, same_bits


def by_definition(x: Tensor, k: int) -> list[int]:
    """Sort by magnitude, ties by index, and leave zeros out."""
    magnitudes = reference.magnitude_bits(x).tolist()
    order = sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))
    return sorted(i for i in order[:k] if magnitudes[i])


def assert_same(selected: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert same_bits(selected[0], expected[0])
    assert same_bits(selected[1], expected[1])


@given(st.data(), cases())
def test_reference_equals_the_definition(data: st.DataObject, case: Case) -> None:
    x = case.vector()[:600]
    k = data.draw(counts(x.numel()))
    indices, values = reference.topk(x, k)
    assert indices.tolist() == by_definition(x, k)
    assert same_bits(values, x[indices.long()])
    assert indices.dtype == torch.int32


@given(st.data(), isas, cases())
def test_topk_is_the_reference(data: st.DataObject, isa: str, case: Case) -> None:
    x = case.vector()
    before = x.clone()
    k = data.draw(counts(x.numel()))
    with using(isa):
        assert_same(kernels.topk(x, k), reference.topk(x, k))
    assert same_bits(x, before)


@given(st.data(), isas, cases(), st.sampled_from([1, 2, 15, 16, 17, 64, 100, 512, 5000]))
def test_chunks_are_selected_one_by_one(
    data: st.DataObject, isa: str, case: Case, chunk: int
) -> None:
    x = case.vector()
    k = data.draw(counts(chunk))
    with using(isa):
        selected = kernels.topk_chunked(x, k, chunk)
    assert_same(selected, reference.topk_chunked(x, k, chunk))
    expected = [
        start + index
        for start in range(0, x.numel(), chunk)
        for index in kernels.topk(x[start : start + chunk], k)[0].tolist()
    ]
    assert selected[0].tolist() == expected


@given(isas, cases(), st.sampled_from([0.0, 1e-8, 0.5, 1.0, 2.5, 3.3, 1e30, float("inf")]))
def test_threshold_is_the_reference(isa: str, case: Case, threshold: float) -> None:
    x = case.vector()
    with using(isa):
        selected = kernels.threshold_select(x, threshold)
    assert_same(selected, reference.threshold_select(x, threshold))


def test_threshold_applies_to_both_signs_and_never_selects_zeros() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -2.0, 2.0, torch.nan])
    assert kernels.threshold_select(x, 2.0)[0].tolist() == [3, 4, 5]
    assert kernels.threshold_select(x, 0.0)[0].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_length_at_every_alignment(isa: str, dtype: torch.dtype) -> None:
    with using(isa):
        for length in LENGTHS[:80]:
            for misaligned in (False, True):
                x = Case("few values", length, dtype, length, misaligned).vector()
                assert_same(kernels.topk(x, length // 2), reference.topk(x, length // 2))


@pytest.mark.parametrize(("kind", "place"), meeting(KINDS, product(ISAS, [1, 3]), each=1))
def test_many_entries_on_several_threads(kind: str, place: tuple[str, int]) -> None:
    isa, threads = place
    x = Case(kind, 800_007, torch.float32, seed=1).vector()
    with using(isa, threads):
        for k in (1, 800, 8000):
            assert_same(kernels.topk(x, k), reference.topk(x, k))
        for k, chunk in ((1, 100), (5, 512), (51, 512)):
            assert_same(kernels.topk_chunked(x, k, chunk), reference.topk_chunked(x, k, chunk))
        long = 200_001  # chunks that are sampled one by one
        assert_same(kernels.topk_chunked(x, 777, long), reference.topk_chunked(x, 777, long))
        selected = kernels.threshold_select(x, 0.7)
        assert_same(selected, reference.threshold_select(x, 0.7))


@pytest.mark.parametrize("run", [1, 40, 1000, 30_000])
@pytest.mark.parametrize("start", [0, 123_457, 600_000])
def test_selection_is_exact_with_a_misleading_sample(run: int, start: int) -> None:
    # The sample may hold too many or too few of a short run of large values.
    x = Case("normal", 800_000, torch.float32, seed=2).vector()
    x[start : start + run] *= 1e6
    for k in (run // 2 + 1, run, run + 1, 2 * run + 100):
        assert_same(kernels.topk(x, k), reference.topk(x, k))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_selection_is_exact_for_zeros_and_the_smallest_values_after_the_largest(
    isa: str, dtype: torch.dtype
) -> None:
    limits = torch.finfo(dtype)
    least = limits.smallest_normal * limits.eps
    chunks = torch.tensor([limits.max, 0, limits.max, least, limits.max, 0, 1], dtype=dtype)
    chunks = chunks.repeat_interleave(512).view(-1, 512)
    # A crowded chunk has later ones sampled: of each 32 entries the first. Where only those are
    # large, the threshold is wrong by all powers of two that there are.
    chunks[1, ::32] = chunks[3, ::32] = limits.max
    chunks[4, 70:] = 0
    with using(isa):
        for k in (1, 5, 20, 64):
            x = chunks.flatten()
            assert_same(kernels.topk_chunked(x, k, 512), reference.topk_chunked(x, k, 512))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("period", [8, 16, 32])
def test_selection_is_exact_if_large_entries_share_a_group(
    isa: str, dtype: torch.dtype, period: int
) -> None:
    # The groups' maxima say little about such values: all of a chunk may reach the k-th maximum.
    x = Case("normal", 3001, dtype, seed=3).vector() / 64
    x[5::period] *= 64
    with using(isa):
        for k in (2, 5, 10):
            assert_same(kernels.topk_chunked(x, k, 300), reference.topk_chunked(x, k, 300))


def test_vector_may_require_grad() -> None:
    x = torch.tensor([1.0, -3.0, 2.0], requires_grad=True)
    assert kernels.topk(x, 1)[1].tolist() == [-3.0]


def test_index_dtype_depends_on_the_size() -> None:
    assert kernels.index_dtype(2**31 - 1) == torch.int32
    assert kernels.index_dtype(2**31) == torch.int64


@pytest.mark.parametrize("call", [lambda x: kernels.topk(x, -1), lambda x: kernels.topk(x[::2], 1)])
def test_wrong_arguments_are_refused(call: object) -> None:
    with pytest.raises((InputError, TypeError)):
        call(torch.ones(8))  # type: ignore[operator]
