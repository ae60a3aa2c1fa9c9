"""The fused accumulate, select and clear."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sparcel import kernels
from sparcel.kernels import reference
from tests.kernels.paths import ISAS, KINDS, Case, cases, counts, isas, using
from tests.strategies import FLOATS, same_bits

WIDE = (torch.float32, torch.float64)


def poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan)


def check(memory: Tensor, gradient: Tensor, k: int, chunk: int | None) -> None:
    """Compare with the reference and with what must hold of any selection."""
    scratch, expected_scratch = poisoned(memory), poisoned(memory)
    before = memory.clone(), gradient.clone()
    indices, values, finite = kernels.accumulate_topk(memory, gradient, scratch, k, chunk)
    expected = reference.accumulate_topk(memory, gradient, expected_scratch, k, chunk)
    assert finite is expected[2]
    assert same_bits(memory, before[0])
    assert same_bits(gradient, before[1])
    if not finite:
        return
    assert same_bits(indices, expected[0])
    assert same_bits(values, expected[1])
    assert same_bits(scratch, expected_scratch)
    kernels.scatter(scratch, indices, values)
    assert torch.equal(scratch, memory + gradient.to(memory.dtype))


@given(st.data(), isas, cases(WIDE), cases(), st.sampled_from([None, None, 1, 16, 100, 512, 5000]))
def test_accumulate_topk_is_the_reference(
    data: st.DataObject, isa: str, memory: Case, gradient: Case, chunk: int | None
) -> None:
    m = memory.vector()
    # The two vectors may have different alignments.
    g = Case(gradient.kind, m.numel(), gradient.dtype, gradient.seed, gradient.misaligned).vector()
    k = data.draw(counts(chunk or m.numel()))
    with using(isa):
        check(m, g, k, chunk)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_many_entries_on_several_threads(kind: str, isa: str, threads: int) -> None:
    # Long enough for streaming stores, with an offset that they must align first.
    memory = Case(kind, 2_100_003, torch.float32, 1, misaligned=True).vector()
    gradient = Case("normal", 2_100_003, torch.float32, seed=2).vector()
    with using(isa, threads):
        check(memory, gradient, 21_000, None)
        check(memory, gradient.bfloat16(), 5, 512)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunk", [None, 16, 512])
@pytest.mark.parametrize("dtype", FLOATS)
def test_non_finite_entry_is_found_at_any_position(
    isa: str, chunk: int | None, dtype: torch.dtype
) -> None:
    length = 5003
    memory, gradient = torch.zeros(length), torch.zeros(length, dtype=dtype)
    scratch = torch.empty(length)
    with using(isa):
        assert kernels.accumulate_topk(memory, gradient, scratch, 3, chunk)[2]
        for position in [*range(70), 4095, 4096, *range(4990, length)]:
            for bad in (torch.nan, torch.inf, -torch.inf):
                gradient[position] = bad
                assert not kernels.accumulate_topk(memory, gradient, scratch, 3, chunk)[2]
            gradient[position] = 0


def test_overflowing_sum_is_not_finite() -> None:
    huge = torch.full((9,), torch.finfo(torch.float32).max)
    assert not kernels.accumulate_topk(huge, huge, torch.empty(9), 1)[2]
    assert kernels.accumulate_topk(huge, torch.zeros(9), torch.empty(9), 1)[2]


def test_k_of_zero_still_adds() -> None:
    scratch = torch.full((3,), torch.nan)
    indices, _, finite = kernels.accumulate_topk(torch.ones(3), torch.arange(3.0), scratch, 0)
    assert finite
    assert indices.numel() == 0
    assert scratch.tolist() == [1, 2, 3]


def test_lengths_and_dtypes_must_fit() -> None:
    three, four = torch.ones(3), torch.ones(4)
    with pytest.raises(ValueError, match="one length"):
        kernels.accumulate_topk(three, four, torch.empty(3), 1)
    with pytest.raises(ValueError, match="one dtype"):
        kernels.accumulate_topk(three, three, torch.empty(3, dtype=torch.float64), 1)
