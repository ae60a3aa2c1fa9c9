"""Packed indices: the words are those of the definition, and every list of indices comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.kernels import packed_words
from sparcel.core.kernels.definitions import packing as reference
from tests.strategies import same_bits

LARGEST = 2**63 - 1


@st.composite
def lists_of_indices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw sorted indices and a size: anywhere, in runs and clusters, the first and the last."""
    size = draw(st.sampled_from([1, 2, 3, 63, 64, 65, 1000, 2**31 - 1, 2**31, LARGEST]))
    anywhere = st.integers(0, size - 1)
    starts = draw(st.lists(anywhere, max_size=3))
    runs = {start + step for start in starts for step in range(draw(st.integers(1, 200)))}
    clusters = {
        start + step * step for start in starts[:1] for step in range(draw(st.integers(0, 40)))
    }
    others = draw(st.sets(anywhere, max_size=20)) | draw(st.sampled_from([set(), {0}, {size - 1}]))
    indices = sorted(index for index in runs | clusters | others if index < size)
    return torch.tensor(indices, dtype=kernels.index_dtype(size)), size


@given(lists_of_indices())
def test_words_are_those_of_the_reference_and_hold_the_indices(case: tuple[Tensor, int]) -> None:
    indices, size = case
    words = kernels.pack_indices(indices, size)
    assert same_bits(words, reference.pack_indices(indices, size))
    for unpack in (kernels.unpack_indices, reference.unpack_indices):
        found, fault = unpack(words, indices.numel(), size)
        assert not fault
        assert same_bits(found, indices)


@pytest.mark.parametrize("layout", ["uniform", "first", "last", "both ends", "all"])
def test_long_lists(layout: str) -> None:
    size, count = 1_000_000, 30_000
    index = torch.arange(count)
    indices = {
        "uniform": torch.randperm(size, generator=torch.Generator().manual_seed(1))[:count].sort()[
            0
        ],
        "first": index,
        "last": size - count + index,
        "both ends": torch.where(index < count // 2, index, size - count + index),
        "all": torch.arange(size),
    }[layout].int()
    words = kernels.pack_indices(indices, size)
    assert same_bits(words, reference.pack_indices(indices, size))
    found, fault = kernels.unpack_indices(words, indices.numel(), size)
    assert torch.equal(found, indices)
    assert not fault


@given(st.data(), st.integers(0, LARGEST))
def test_more_indices_never_take_fewer_words(data: st.DataObject, size: int) -> None:
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, min(size, low + data.draw(st.sampled_from([1, 9, size])))))
    assert packed_words(low, size) <= packed_words(high, size)


@given(lists_of_indices(), st.randoms(use_true_random=False))
def test_any_words_are_read_or_refused(case: tuple[Tensor, int], random) -> None:
    """Also with words of garbage, both readers find the same indices or a fault."""
    indices, size = case
    words = kernels.pack_indices(indices, size)
    for place in range(words.numel()):
        if random.random() < 0.5:
            words[place] ^= 1 << random.randrange(63)
    found, fault = kernels.unpack_indices(words, indices.numel(), size)
    expected, wrong = reference.unpack_indices(words, indices.numel(), size)
    assert fault == bool(wrong)
    assert same_bits(found, expected)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(40, 90))
def test_unsorted_indices_are_packed_to_garbage_or_refused(given: list[int], size: int) -> None:
    """They are a caller's mistake. Nothing is written out of bounds, as the sanitizers see."""
    indices = torch.tensor(given, dtype=torch.int32)
    try:
        words = kernels.pack_indices(indices, size)
    except ValueError:
        return
    assert words.numel() == packed_words(len(given), size)


def test_counts_and_words_must_agree() -> None:
    words = kernels.pack_indices(torch.tensor([1, 5], dtype=torch.int32), 9)
    with pytest.raises(ValueError, match="those of so many indices"):
        kernels.unpack_indices(words, 2, 90_000_000_000)
    with pytest.raises(ValueError, match="more indices than coordinates"):
        kernels.pack_indices(torch.tensor([0, 1, 2]), 2)
