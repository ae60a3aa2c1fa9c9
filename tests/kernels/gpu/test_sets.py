"""Differences and intersections on a GPU or in Triton's interpreter."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

pytest.importorskip("triton")

from sparcel.core import device
from sparcel.core.kernels.definitions import reduce as reference
from sparcel.core.kernels.gpu import reduce as kernels
from sparcel.errors import InputError
from tests.card import moved, on_card, seen
from tests.kernels.test_merge import Pair, random_streams
from tests.strategies import DTYPES, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
BOTH = [(kernels.within, reference.within), (kernels.without, reference.without)]


def check(stream: Pair, others: Tensor) -> None:
    for kernel, definition in BOTH:
        found = kernel(stream[0].to(DEVICE), stream[1].to(DEVICE), others.to(DEVICE))
        for part, expected in zip(found, definition(*stream, others), strict=True):
            assert same_bits(part.cpu(), expected)


@settings(max_examples=12)
@given(
    st.sampled_from([0, 1, 60]),
    st.sampled_from([1, 10, 100, 2**31 - 1, 2**40]),
    st.sampled_from(DTYPES),
    st.sampled_from([None, None, 0, 3]),
    st.integers(0, 99),
)
def test_entries_are_those_of_the_definition(
    most: int, size: int, dtype: torch.dtype, width: int | None, seed: int
) -> None:
    stream, other = random_streams(2, most, size, dtype, width, seed)
    check(stream, other[0])
    check(stream, torch.cat([stream[0][::2], other[0]]).unique())


@settings(max_examples=10)
@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_entries_are_those_of_sets(own: set[int], others: set[int]) -> None:
    indices, listed = (torch.tensor(sorted(one), dtype=torch.int64) for one in (own, others))
    check((indices, indices.double()), listed)


@pytest.mark.parametrize("lengths", [(2000, 2000), (2000, 3), (3, 2000), (512, 0)])
def test_several_programs(lengths: tuple[int, int]) -> None:
    own, others = (torch.arange(length, dtype=torch.int32) * 3 for length in lengths)
    check((own, own.float()), others)
    check((own, own.float()), others * 2)


def test_unsorted_indices_stay_in_bounds() -> None:
    own, others = torch.tensor([9, -1, 9, 2**31 - 1, 0]), torch.tensor([5, 9, -7])
    for kernel, _ in BOTH:
        indices, values = kernel(own.to(DEVICE), own.double().to(DEVICE), others.to(DEVICE))
        assert indices.tolist() == values.tolist()


def test_results_are_new_tensors() -> None:
    ((indices, values),) = random_streams(1, 9, 99, torch.float32)
    indices, values = indices.to(DEVICE), values.to(DEVICE)
    for found in (
        kernels.without(indices, values, indices[:0]),
        kernels.within(indices, values, indices),
    ):
        assert same_bits(found[0].cpu(), indices.cpu())
        assert found[0].data_ptr() != indices.data_ptr()
        assert found[1].data_ptr() != values.data_ptr()


def test_indices_and_values_must_agree() -> None:
    index = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(InputError, match="one dtype"):
        kernels.within(index, torch.ones(1, device=DEVICE), index.long())
    with pytest.raises(InputError, match="value or row"):
        kernels.without(index, torch.ones(2, device=DEVICE), index)


@pytest.mark.skipif(DEVICE != "cpu", reason="the card stands for a GPU where there is none")
def test_only_the_length_is_read() -> None:
    stream, other = random_streams(2, 60, 100, torch.float32)
    with on_card():
        before = device.reads()
        found = kernels.within(moved(stream[0]), moved(stream[1]), moved(other[0]))
        assert device.reads() == before + 1
    for part, expected in zip(found, reference.within(*stream, other[0]), strict=True):
        assert same_bits(seen(part), expected)
