"""Differences and intersections of sparse vectors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.kernels.definitions import reduce as reference
from tests.kernels.test_merge import Pair, random_streams, stream_lists
from tests.strategies import same_bits

BOTH = [(kernels.within, reference.within), (kernels.without, reference.without)]


def check(stream: Pair, others: Tensor) -> None:
    for kernel, definition in BOTH:
        for found, expected in zip(
            kernel(*stream, others), definition(*stream, others), strict=True
        ):
            assert same_bits(found, expected)


@given(stream_lists())
def test_entries_are_those_of_the_reference(streams: list[Pair]) -> None:
    check(streams[0], streams[-1][0])
    check(streams[0], torch.cat([indices for indices, _ in streams]).unique())


@given(
    st.sets(st.integers(0, 40)),
    st.sets(st.integers(0, 40)),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_entries_are_those_of_sets(own: set[int], others: set[int], dtype: torch.dtype) -> None:
    indices, listed = torch.tensor(sorted(own), dtype=dtype), torch.tensor(sorted(others))
    for (kernel, definition), left in zip(BOTH, (own & others, own - others), strict=True):
        for function in (kernel, definition):
            kept, values = function(indices, indices.double(), listed.to(dtype))
            assert kept.tolist() == values.tolist() == sorted(left)


@pytest.mark.parametrize("lengths", [(100_000, 100_000), (100_000, 10), (10, 100_000)])
def test_long_lists(lengths: tuple[int, int]) -> None:
    own, other = (random_streams(1, most, 200_000, torch.float32, seed=most)[0] for most in lengths)
    check(own, other[0])


def test_indices_and_values_must_agree() -> None:
    index = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="one dtype"):
        kernels.within(index, torch.ones(1), index.long())
    with pytest.raises(ValueError, match="value or row"):
        kernels.without(index, torch.ones(2), index)
