"""The fused accumulate, select and clear."""

from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.kernels import Addition
from sparcel.core.kernels.definitions import select as reference
from tests.kernels.paths import ISAS, KINDS, Case, cases, counts, isas, using
from tests.sampling import meeting
from tests.strategies import FLOATS, same_bits

WIDE = (torch.float32, torch.float64)


def poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan)


def copy_of(addition: Addition) -> Addition:
    vectors = {name: part for name, part in vars(addition).items() if isinstance(part, Tensor)}
    return replace(addition, **{name: part.clone() for name, part in vectors.items()})


def check(addition: Addition, k: int, chunk: int | None) -> None:
    """Compare with the reference and with what must hold of any selection."""
    before, expected = copy_of(addition), copy_of(addition)
    indices, values, finite = kernels.accumulate_topk(addition, k, chunk)
    expected_indices, expected_values, expected_finite = reference.accumulate_topk(
        expected, k, chunk
    )
    assert finite is expected_finite
    assert same_bits(addition.memory, before.memory)
    if addition.velocity is not None:
        assert same_bits(addition.velocity, before.velocity)
    kept = torch.zeros_like(before.gradient) if addition.clear else before.gradient
    assert same_bits(addition.gradient, kept)
    if not finite:
        return
    assert same_bits(indices, expected_indices)
    assert same_bits(values, expected_values)
    assert same_bits(addition.scratch, expected.scratch)
    addend = before.gradient.to(before.memory.dtype) * addition.scale
    if addition.velocity is not None:
        addend += addition.velocity * addition.momentum
    if addition.entering is not None:
        assert same_bits(addition.entering, addend)
    kernels.scatter(addition.scratch, indices, values)
    assert torch.equal(addition.scratch, addition.memory + addend)


@given(
    st.data(),
    isas,
    cases(WIDE),
    cases(),
    st.sampled_from([None, None, 1, 16, 100, 512, 5000]),
    st.sampled_from([1.0, 1.0, 1 / 3]),
    st.sampled_from([None, 0.9]),
    st.booleans(),
)
def test_accumulate_topk_is_the_reference(
    data: st.DataObject,
    isa: str,
    memory: Case,
    gradient: Case,
    chunk: int | None,
    scale: float,
    momentum: float | None,
    clear: bool,
) -> None:
    m = memory.vector()
    # The vectors may have different alignments.
    g = replace(gradient, length=m.numel()).vector()
    addition = Addition(m, g, poisoned(m), scale, clear=clear)
    if momentum is not None:
        velocity = replace(gradient, length=m.numel(), dtype=m.dtype, seed=100).vector()
        entering = data.draw(st.sampled_from([poisoned(m), None]))
        addition = replace(addition, momentum=momentum, velocity=velocity, entering=entering)
    k = data.draw(counts(chunk or m.numel()))
    with using(isa):
        check(addition, k, chunk)


# Half of the kinds: `test_select` has the selection from all of them.
@pytest.mark.parametrize(("kind", "place"), meeting(KINDS[::2], product(ISAS, [1, 3]), each=1))
def test_many_entries_on_several_threads(kind: str, place: tuple[str, int]) -> None:
    isa, threads = place
    # Long enough for streaming stores, with an offset that they must align first.
    memory = Case(kind, 2_100_003, torch.float32, 1, misaligned=True).vector()
    gradient = Case("normal", 2_100_003, torch.float32, seed=2).vector()
    with using(isa, threads):
        check(Addition(memory, gradient, poisoned(memory)), 21_000, None)
        corrected = Addition(
            memory,
            gradient.bfloat16(),
            poisoned(memory),
            scale=0.3,
            momentum=0.9,
            velocity=gradient,
            entering=poisoned(memory),
            clear=True,
        )
        check(corrected, 5, 512)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunk", [None, 16, 512])
@pytest.mark.parametrize("dtype", FLOATS)
def test_non_finite_entry_is_found_at_any_position(
    isa: str, chunk: int | None, dtype: torch.dtype
) -> None:
    length = 5003
    memory, gradient = torch.zeros(length), torch.zeros(length, dtype=dtype)
    addition = Addition(memory, gradient, torch.empty(length))
    with using(isa):
        assert kernels.accumulate_topk(addition, 3, chunk)[2]
        for position in [*range(70), 4095, 4096, *range(4990, length)]:
            for bad in (torch.nan, torch.inf, -torch.inf):
                gradient[position] = bad
                assert not kernels.accumulate_topk(addition, 3, chunk)[2]
            gradient[position] = 0


def test_overflowing_sum_is_not_finite() -> None:
    huge = torch.full((9,), torch.finfo(torch.float32).max)
    assert not kernels.accumulate_topk(Addition(huge, huge, torch.empty(9)), 1)[2]
    assert kernels.accumulate_topk(Addition(huge, torch.zeros(9), torch.empty(9)), 1)[2]


def test_k_of_zero_still_adds() -> None:
    scratch = torch.full((3,), torch.nan)
    addition = Addition(torch.ones(3), torch.arange(3.0), scratch)
    indices, _, finite = kernels.accumulate_topk(addition, 0)
    assert finite
    assert indices.numel() == 0
    assert scratch.tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["gradient", "scratch", "velocity", "entering"])
def test_lengths_and_dtypes_must_fit(name: str) -> None:
    addition = Addition(torch.ones(3), torch.ones(3), torch.empty(3))
    with pytest.raises(ValueError, match="one length"):
        kernels.accumulate_topk(replace(addition, **{name: torch.ones(4)}), 1)
    if name != "gradient":
        doubles = torch.ones(3, dtype=torch.float64)
        with pytest.raises(ValueError, match="the dtype of memory"):
            kernels.accumulate_topk(replace(addition, **{name: doubles}), 1)
