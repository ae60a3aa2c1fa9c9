"""Packed indices, on a GPU or in Triton's interpreter: the words are those of the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from sparcel.core.kernels.definitions import packing as reference
from sparcel.core.kernels.gpu import _base
from sparcel.core.kernels.gpu import packing as kernels
from tests.card import launches, moved, on_card, seen
from tests.kernels.test_packing import lists_of_indices
from tests.strategies import same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
few = settings(max_examples=10)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tile be a program, and each program a group of its own."""
    monkeypatch.setattr(kernels, "_TILES", 2)
    for module in (kernels, _base):
        monkeypatch.setattr(module, "GROUP", 1)


def unpacked(words: Tensor, count: int, size: int) -> Tensor | None:
    """Return what the kernel reads, None where it finds a fault."""
    found, fault = kernels.unpack_indices(words.to(DEVICE), count, size)
    return None if fault else found.cpu()


def check(indices: Tensor, size: int) -> None:
    """Pack and unpack on the device, and compare with the definition."""
    words = kernels.pack_indices(indices.to(DEVICE), size).cpu()
    assert same_bits(words, reference.pack_indices(indices, size))
    assert same_bits(unpacked(words, indices.numel(), size), indices)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.uint8, torch.bfloat16, torch.int32, torch.float64]),
            st.sampled_from([0, 1, 2, 3, 7, 8, 9, 4095, 4100]),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, True, False]),
)
@few
def test_messages_are_those_of_the_definition(
    kinds: list[tuple[torch.dtype, int, bool]], finite: bool | None
) -> None:
    parts = [torch.arange(n + skip).to(dtype)[skip:] for dtype, n, skip in kinds]
    length = 40 + sum(-(-part.nbytes // 8) * 8 for part in parts)
    header = bytes(range(32)) + length.to_bytes(8, "little")
    flag = None if finite is None else torch.tensor(finite)
    expected = reference.join_message(parts, header, flag, 1 << 59)
    there = [part.to(DEVICE) for part in parts]
    found = kernels.join_message(there, header, flag if flag is None else flag.to(DEVICE), 1 << 59)
    assert same_bits(torch.cat([part.cpu() for part in found]), torch.cat(list(expected)))
    assert found[0][7].item() == (15 if finite is False else 7)
    with pytest.raises(ValueError, match="take up the message"):
        kernels.join_message(there, bytes(40))


@given(lists_of_indices())
@few
def test_words_are_those_of_the_definition_and_hold_the_indices(case: tuple[Tensor, int]) -> None:
    check(*case)


@pytest.mark.parametrize("bits", [1, 6, 7, 31, 32, 33, 40, 62])
def test_sizes_up_to_the_largest(bits: int) -> None:
    """Indices have from 2 to 57 low bits, which lie across words in every way."""
    size = 1 << bits
    generator = torch.Generator().manual_seed(bits)
    for count in (1, 2, 37, 200):
        drawn = torch.randint(0, size, (count,), generator=generator).unique()
        check(drawn.to(reference.index_dtype(size)), size)
    check(torch.tensor([0, size - 1], dtype=reference.index_dtype(size)), size)


@pytest.mark.parametrize("layout", ["sparse", "first", "both ends", "every other", "all"])
def test_several_programs(layout: str) -> None:
    size, count = 6000, 1300
    index = torch.arange(count)
    indices = {
        "sparse": torch.randperm(size, generator=torch.Generator().manual_seed(1))[:count].sort()[
            0
        ],
        "first": index,
        "both ends": torch.where(index < count // 2, index, size - count + index),
        "every other": torch.arange(0, size, 2),
        "all": torch.arange(size),
    }[layout]
    check(indices.int(), size)


@given(lists_of_indices(), st.randoms(use_true_random=False))
@few
def test_any_words_are_read_or_refused(case: tuple[Tensor, int], random) -> None:
    """Also with words of garbage, the kernel and the definition find the same, or a fault."""
    indices, size = case
    words = reference.pack_indices(indices, size)
    for place in range(words.numel()):
        if random.random() < 0.3:
            words[place] ^= 1 << random.randrange(63)
    found = unpacked(words, indices.numel(), size)
    expected, fault = reference.unpack_indices(words, indices.numel(), size)
    assert (found is None) == bool(fault)
    assert found is None or same_bits(found, expected)


@pytest.mark.parametrize("filler", [0, -1])
@pytest.mark.parametrize("size", [100, 2**40])
def test_words_without_a_bit_and_with_all(size: int, filler: int) -> None:
    words = torch.full((reference.packed_words(50, size),), filler)
    assert unpacked(words, 50, size) is None


def test_indices_out_of_range_write_nothing_elsewhere() -> None:
    """They are a caller's mistake."""
    indices = torch.tensor([-(2**31), -1, 99, 100, 2**31 - 1], dtype=torch.int32)
    for size in (6, 100):
        words = kernels.pack_indices(indices.to(DEVICE), size)
        assert words.numel() == reference.packed_words(5, size)


@pytest.mark.skipif(DEVICE != "cpu", reason="the card stands for a GPU where there is none")
@pytest.mark.parametrize("size", [100, 2**40])
def test_nobody_waits_for_indices(size: int) -> None:
    indices = torch.arange(30, dtype=reference.index_dtype(size))
    with on_card(), launches() as counted:
        words = kernels.pack_indices(moved(indices), size)
        found, fault = kernels.unpack_indices(words, 30, size)
        assert same_bits(seen(found), indices)
        assert not seen(fault)
        assert counted.triton == ["_pack", "_count", "_unpack"]
        assert counted.torch == ["new_zeros"] * 2
        assert counted.copies == []
        _, fault = kernels.unpack_indices(words * 0, 30, size)
        assert seen(fault)
