"""The documented layout, spelled out in `tests.delta.plain`, is what the codec writes and reads."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given

from sparcel.products.delta import decode, encode, version_of
from sparcel.products.delta.chunk import read_chunk
from sparcel.products.delta.elements import piece_of_slice
from tests.delta import plain
from tests.delta.pairs import (
    CODES,
    DTYPES,
    STEPS,
    Model,
    Recipe,
    bits_of,
    chunk_bytes,
    chunks_of,
    codes,
    models,
)


def plain_bits(model: Model) -> dict[str, list[int]]:
    """Return the bits of tensors as integers without a sign."""
    found = {}
    for name, tensor in model.items():
        mask = (1 << 8 * tensor.dtype.itemsize) - 1
        found[name] = [bits & mask for bits in bits_of(tensor).flatten().tolist()]
    return found


def agree(new: Model, old: Model, code: str) -> int:
    """Compare what both decoders find in the chunks, and return how many elements change."""
    base, changed = plain_bits(old), 0
    for chunk in encode(new, old, code=code):
        found: dict[str, dict[int, int]] = {}
        for change in decode(chunk, old):
            if change.values is not None:
                bits = plain_bits({"w": change.values})["w"]
                found.setdefault(change.name, {}).update(
                    zip(change.indices.tolist(), bits, strict=True)
                )
        expected = {name: these for name, these in plain.decode(chunk, base).items() if these}
        assert expected == {name: these for name, these in found.items() if these}
        if code == "values":
            assert plain.decode(chunk) == plain.decode(chunk, base)
        changed += sum(map(len, expected.values()))
    return changed


@given(models(most=2), codes, chunk_bytes)
def test_both_decoders_find_the_same_changes(
    model: tuple[Model, Model], code: str, most: int
) -> None:
    with chunks_of(most):
        agree(model[1], model[0], code)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    for step, code in zip(STEPS, itertools.cycle(CODES)):
        old, new = Recipe(dtype, 300, step=step, share=0.3, seed=3).pair()
        assert agree({"w": new}, {"w": old}, code) > 10


def test_gaps_of_all_lengths() -> None:
    """Short and long gaps in turn, in one class and in several."""
    old = torch.randn(40_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    places = torch.cat([torch.arange(2000), torch.tensor([3000, 3001, 6000, 39_999])])
    new = old.clone()
    bits_of(new)[places] += 1
    for code in ("exponents", "values"):
        assert agree({"w": new}, {"w": old}, code) == len(places)


def test_a_chunk_has_several_classes_and_pieces() -> None:
    """What is compared here is not all of one kind."""
    old = {name: Recipe(torch.bfloat16, 3000, seed=i).pair()[0] for i, name in enumerate("ab")}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        bits_of(tensor)[::3] += 1
    (chunk,) = encode(new, old)
    header, _ = plain.read(chunk)
    assert len(plain.pieces_of(header)) == 2
    assert len(header["limits"]) > 2
    assert agree(new, old, "exponents") == 2000


def test_numbers_of_pieces() -> None:
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    piece = piece_of_slice("w", torch.int8, (4, 6, 5), (0, 2, 0), (4, 3, 5))
    cut = (piece.first, piece.count, piece.row, piece.stride)
    assert plain.numbers_of([4, 6, 5], *cut) == whole[:, 2:5].flatten().tolist()
    assert plain.numbers_of([4, 6, 5], 7, 20) == list(range(7, 27))
    assert plain.numbers_of([4, 6, 5]) == whole.flatten().tolist()


@given(models(most=2))
def test_sums(model: tuple[Model, Model]) -> None:
    """A version's sum is that of its elements, and a chunk's what it adds to it."""
    old, new = model

    def total(tensors: Model) -> int:
        return sum(
            plain.hashed(plain.key_of(name, str(t.dtype).removeprefix("torch."), t.shape), i, bits)
            for name, t in tensors.items()
            for i, bits in enumerate(plain_bits({"w": t})["w"])
        )

    assert version_of(new).sum == total(new) % (1 << 64)
    with chunks_of(1000):
        added = sum(read_chunk(chunk).sum for chunk in encode(new, old))
    assert (total(old) + added - total(new)) % (1 << 64) == 0
