"""Chunks of what is served are short: packed values, narrow ones in wide dtypes, names."""

from __future__ import annotations

import math
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from sparcel.errors import FormatError, InputError, SparcelError
from sparcel.products.delta import (
    apply_,
    decode,
    encode,
)
from sparcel.products.delta.chunk import read_chunk
from tests.delta.pairs import (
    CODES,
    FLOATS,
    INTEGERS,
    Recipe,
    bits_of,
    chunks_of,
    copied,
    same,
)
from tests.delta.repacking import repacked


def packed_by(bits: int, values: Tensor) -> Tensor:
    """Pack nibbles into integers of so many bits, the first one lowest."""
    shifts = torch.arange(0, bits, 4)
    return (values.long().view(-1, bits // 4) << shifts).sum(1).to(INTEGERS[bits // 8])


@pytest.mark.parametrize("bits", [8, 32])
def test_packed_values_are_coded_as_nibbles(bits: int) -> None:
    """So they cost as much however they are packed: a place, and little more than a bit."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(16, (1 << 20,), generator=generator)
    moved = (old + 1 - 2 * torch.randint(2, old.shape, generator=generator)).clamp(0, 15)
    new = torch.where(torch.rand(old.shape, generator=generator) < 1e-3, moved, old)
    before, after = ({"w": packed_by(bits, values)} for values in (old, new))
    (chunk,) = encode(after, before)
    read, changed = read_chunk(chunk), int((old != new).sum())
    elements = int((before["w"] != after["w"]).sum())
    assert (read.code, read.nibbles, read.changed) == ("nibbles", changed, elements)
    assert 8 * len(chunk) < (math.log2(1000) + 1.45 + 1.4) * changed + 1000
    target = copied(before)
    inverse = apply_(target, [chunk])
    assert same(target, after)
    assert inverse.changed == elements
    inverse.undo()
    assert same(target, before)
    with pytest.raises(InputError, match="needs the old weights"):
        list(decode(chunk))


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float16, torch.float8_e5m2),
        (torch.int32, torch.int16),
    ],
    ids=str,
)
def test_values_of_a_narrower_dtype_cost_no_more_in_a_wider_one(
    wide: torch.dtype, narrow: torch.dtype
) -> None:
    pair = Recipe(narrow, 50_000, share=0.02, step="few").pair()
    integers = 0 if narrow in FLOATS else 9  # of these, multiples of a power of two
    sizes = []
    for old, new in (pair, [tensor.to(wide) * 2**integers for tensor in pair]):
        chunks = list(encode({"w": new}, {"w": old}))
        target = {"w": old.clone()}
        apply_(target, chunks)
        assert same(target, {"w": new})
        sizes.append(sum(map(len, chunks)))
    assert sizes[1] < 1.02 * sizes[0] + 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int64], ids=str)
def test_what_many_elements_do_alike_is_packed(dtype: torch.dtype) -> None:
    """It takes no more than the XOR of all elements, packed."""
    old, _ = Recipe(dtype, 100_000, "any bits").pair()
    new = old.clone()
    bits_of(new)[::3] ^= 0x35
    (packed,) = encode({"w": new}, {"w": old})
    xor = bits_of(old) ^ bits_of(new)
    assert len(packed) < len(zlib.compress(xor.numpy(), 1))
    assert (read_chunk(packed).code, read_chunk(packed).changed) == ("xor", int((xor != 0).sum()))
    target = {"w": old.clone()}
    apply_(target, [packed]).undo()
    assert same(target, {"w": old})
    apply_(target, [packed])
    assert same(target, {"w": new})
    with pytest.raises(InputError, match="needs the old weights"):
        list(decode(packed))
    with pytest.raises(FormatError, match=r"XOR is wrong: .* bytes instead of"):
        apply_({"w": old.clone()}, [_with_xor(packed, zlib.compress(bytes(9 << 20)))])
    with pytest.raises(FormatError, match="XOR is wrong"):
        apply_({"w": old.clone()}, [_with_xor(packed, b"no stream")])


def _with_xor(chunk: bytes, xor: bytes) -> bytes:
    def change(header: dict[str, Any], streams: bytearray) -> None:
        streams[:] = xor
        header["streams"] = [0, 0, len(xor)]

    return repacked(chunk, change)


def test_tensors_that_stay_are_not_named() -> None:
    old = {f"layers.{i}.w": torch.zeros(8, dtype=torch.int8) for i in range(100)}
    new = {**old, "layers.7.w": old["layers.7.w"] + 1, "layers.70.w": old["layers.70.w"] + 2}
    (chunk,) = encode(new, old)
    assert [piece.name for piece in read_chunk(chunk).pieces] == ["layers.7.w", "layers.70.w"]
    assert len(chunk) < 150


NAMES = (
    "w",
    "",
    "0",
    "a.1.b.2",
    "a.10.b.2",
    "a.01.b",
    "a.2.b.07",
    "9" * 30,
    "²",
    "٣.x",
    "-1",
    "a#3",
)


def test_names_with_numbers_in_them() -> None:
    """What is told of a name together with others is the same name again."""
    old = {name + more: torch.zeros(2) for name in NAMES for more in ("", ".0", "7")}
    new = {name: tensor + 1 for name, tensor in old.items()}
    (chunk,) = encode(new, old)
    assert {piece.name for piece in read_chunk(chunk).pieces} == set(old)
    apply_(old, [chunk])
    assert same(old, new)


def test_names_with_many_numbers_in_them() -> None:
    """As of adapters that are named by hashes: they need no more brackets than others."""
    old = {".".join(str(i * j) for j in range(1, 40)): torch.zeros(1) for i in range(4000)}
    new = {name: tensor + 1 for name, tensor in old.items()}
    (chunk,) = encode(new, old)
    apply_(old, [chunk])
    assert same(old, new)


def test_chunks_are_long_where_little_changes() -> None:
    """As a header and models cost much beside few changes, and memory is for many of them."""
    old = {f"w{i}": torch.zeros(1 << 21, dtype=torch.int16) for i in range(4)}
    few, many = copied(old), copied(old)
    for i in range(4):
        few[f"w{i}"][:: 5000 + i] += 1
        many[f"w{i}"][:: 5 + i] += 1
    assert len(list(encode(few, old))) == 1
    assert len(list(encode(many, old))) == 4


def test_few_changes_are_short() -> None:
    """Steps are shorter than values, and exponents tell where a training step changes weights."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(200_000, generator=generator)
    moved = weights + 1e-4 * torch.randn(200_000, generator=generator)
    old, new = {"w": weights.bfloat16()}, {"w": moved.bfloat16()}
    changed = int((old["w"] != new["w"]).sum())
    sizes = {code: sum(map(len, encode(new, old, code=code))) for code in CODES}
    assert sizes["exponents"] < 0.9 * sizes["steps"] < 0.9 * sizes["values"] < 2 * changed


def test_sources_may_repeat_elements() -> None:
    """Expanded tensors are read like others."""
    old = {"w": torch.zeros(1).expand(300, 70), "v": torch.zeros(70).expand(300, 70)}
    new = {"w": torch.arange(70.0).expand(300, 70), "v": torch.ones(300, 1).expand(300, 70)}
    target = {name: tensor.contiguous() for name, tensor in old.items()}
    with chunks_of(1000):
        apply_(target, encode(new, old))
    assert same(target, {name: tensor.contiguous() for name, tensor in new.items()})


def test_a_target_that_repeats_elements_is_refused() -> None:
    """Its elements cannot become different."""
    shared = torch.zeros(1)
    target = {"a": torch.zeros(300), "w": shared.expand(300)}
    old = {name: tensor.contiguous() for name, tensor in target.items()}
    with pytest.raises(SparcelError):
        apply_(target, encode({"a": old["a"] + 1, "w": torch.arange(300.0)}, old))
    assert same(target, old)
