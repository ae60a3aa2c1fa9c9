"""Chunks make the new weights of the old ones, bit by bit, and all of them or none."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sparcel import _cpu
from sparcel.delta import (
    Change,
    Version,
    apply_,
    assign_,
    decode,
    encode,
    prepare,
    version_of,
)
from sparcel.delta.applying import check_together
from sparcel.delta.base import copied as base_copy
from sparcel.delta.bits import hashed, key_of
from sparcel.delta.chunk import Chunk, read_chunk
from sparcel.delta.decoding import found_in
from sparcel.delta.encoding import encode_parts
from sparcel.delta.parts import Part, parts_of, ties_of
from sparcel.delta.pieces import Piece, piece_of_slice
from sparcel.delta.prepared import swap_all
from sparcel.delta.writable import check_writable
from sparcel.errors import FormatError, InputError, SparcelError, VersionError
from tests.delta.pairs import (
    CODES,
    DTYPES,
    FLOATS,
    INTEGERS,
    SIZES,
    STEPS,
    Model,
    Recipe,
    bits_of,
    chunk_bytes,
    chunks_of,
    codes,
    copied,
    laid_out,
    models,
    recipes,
    same,
)
from tests.delta.repacking import framed, repacked
from tests.kernels.paths import ISAS, isas, using


def written(old: Model, chunks: Iterable[bytes], knows_base: bool = True) -> Model:
    """Apply chunks by what `decode` says of them."""
    new = {name: tensor.reshape(-1) for name, tensor in copied(old).items()}
    shapes = {name: tensor.shape for name, tensor in old.items()}
    # A tensor with another dtype or shape is removed and new, in any order.
    changes = [change for chunk in chunks for change in decode(chunk, old if knows_base else None)]
    for change in sorted(changes, key=lambda change: change.values is not None):
        if change.values is None:
            del new[change.name], shapes[change.name]
            continue
        if change.name not in new:
            assert change.new
            new[change.name] = torch.zeros(change.shape, dtype=change.dtype).view(-1)
            shapes[change.name] = torch.Size(change.shape)
        assert (change.indices.dtype, change.values.dtype) == (torch.int64, change.dtype)
        assert len(change.indices) == len(change.indices.unique())
        bits_of(new[change.name])[change.indices] = bits_of(change.values)
    return {name: tensor.view(shapes[name]) for name, tensor in new.items()}


# ---- round trips


@given(models(), codes, chunk_bytes, isas, st.randoms(use_true_random=False))
def test_weights_become_the_new_ones_and_the_old_ones_again(
    model: tuple[Model, Model], code: str, most: int, isa: str, order: random.Random
) -> None:
    old, new = model
    base = version_of(old, 3)
    with using(isa), chunks_of(most):
        chunks = list(encode(new, old, code=code, since=base, target=9))
        order.shuffle(chunks)
        target = copied(old)
        there = dict(target)
        inverse = apply_(target, chunks, since=base)
    assert same(target, new)
    assert (inverse.base, inverse.version) == (base, version_of(new, 9))
    kept = [name for name in old if name in new and _alike(old[name], new[name])]
    assert all(target[name] is there[name] for name in kept), "changed in place"
    inverse.undo()
    assert same(target, old)
    with pytest.raises(VersionError, match="undone already"):
        inverse.undo()
    assert same(target, old)


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


@given(models(), codes, chunk_bytes)
def test_decoded_changes_are_the_new_weights(
    model: tuple[Model, Model], code: str, most: int
) -> None:
    old, new = model
    with chunks_of(most):
        chunks = list(encode(new, old, code=code))
    assert same(written(old, chunks), new)
    if code == "values":
        assert same(written(old, chunks, knows_base=False), new)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_step(dtype: torch.dtype) -> None:
    for i, (step, code) in enumerate(itertools.product(STEPS, CODES)):
        recipe = Recipe(dtype, SIZES[-1 - i % 3], "any bits", step, 0.3 + 0.7 * (i % 2), seed=i)
        old, new = ({"w": tensor} for tensor in recipe.pair())
        target = copied(old)
        apply_(target, encode(new, old, code=code))
        assert same(target, new)
        target = Model()
        apply_(target, encode(new, {}, code=code))
        assert same(target, new)


LENGTHS = (*range(4), *range(62, 67), *range(126, 131), 192, 256, 320, 447, 448, 449, 2048, 2112)


@pytest.mark.parametrize("code", ["exponents", "values"])
@pytest.mark.parametrize("size", LENGTHS)
def test_every_length_and_number_of_changes(code: str, size: int) -> None:
    """Of a tensor beside another one, with exponents of several classes."""
    for changed in {0, 1, size // 2, size} & set(range(size + 1)):
        generator = torch.Generator().manual_seed(changed)
        old = {name: torch.randn(n, generator=generator) for name, n in [("a", 2500), ("b", size)]}
        new = copied(old)
        bits_of(new["a"])[::2] += 1
        bits_of(new["b"])[torch.randperm(size, generator=generator)[:changed]] += 1
        target = copied(old)
        for isa in ISAS:
            with using(isa):
                inverse = apply_(target, encode(new, old, code=code, since=version_of(old)))
            assert same(target, new)
            assert inverse.version == version_of(new, 1)
            inverse.undo()


@given(recipes)
def test_a_delta_of_nothing_is_one_small_chunk(recipe: Recipe) -> None:
    model = {"w": recipe.pair()[0]}
    base = version_of(model, 7)
    (chunk,) = encode(model, model, since=base)
    assert len(chunk) < 300
    target = copied(model)
    inverse = apply_(target, [chunk], since=base)
    assert (inverse.version, inverse.changed) == (Version(8, base.sum), 0)
    assert same(target, model)


def test_steps_across_zero_and_to_the_ends() -> None:
    """−0 lies between 0 and the numbers below it, and the order of NaNs wraps around."""
    for dtype in FLOATS:
        integers = INTEGERS[dtype.itemsize]
        least, most = torch.iinfo(integers).min, torch.iinfo(integers).max
        some = torch.tensor([0, least, 1, least + 1, most, -1, most - 1, -2], dtype=integers)
        old, new = (part.reshape(-1) for part in torch.meshgrid(some, some, indexing="ij"))
        model, other = {"w": old.view(dtype)}, {"w": new.view(dtype)}
        for code in CODES:
            target = copied(model)
            apply_(target, encode(other, model, code=code))
            assert same(target, other)


# ---- what is served


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


# ---- the same bytes everywhere


@given(models(), codes, chunk_bytes)
def test_instruction_sets_and_threads_do_not_change_bytes(
    model: tuple[Model, Model], code: str, most: int
) -> None:
    old, new = model
    made = []
    for isa, threads in [*((isa, 1) for isa in ISAS), (ISAS[-1], 3)]:
        with using(isa, threads), chunks_of(most):
            chunks = list(encode(new, old, code=code))
            made.append((chunks, version_of(new)))
            target = copied(old)
            apply_(target, chunks)
            assert same(target, new)
    assert all(one == made[0] for one in made)


@given(models(), codes, chunk_bytes)
def test_a_device_finds_the_same_bits(model: tuple[Model, Model], code: str, most: int) -> None:
    """Where tensors are elsewhere, torch finds what changes; here the host pretends to be one."""
    old, new = model
    base = version_of(old)
    with chunks_of(most):
        chunks = list(encode(new, old, code=code, since=base))
    target = copied(old)
    with patch("sparcel.delta.decoding.on_host", lambda *_: False):
        inverse = apply_(target, chunks)
        assert same(target, new)
        assert inverse.version == version_of(new, 1)
        inverse.undo()
    assert same(target, old)


@st.composite
def strided_pieces(draw: st.DrawFn) -> tuple[Piece, Tensor]:
    """Draw elements of a tensor in rows."""
    dtype = draw(st.sampled_from(DTYPES))
    row, count = draw(st.integers(1, 70)), draw(st.integers(0, 300))
    stride = row + draw(st.integers(0, 100))
    piece = Piece("w", dtype, (300, 170), draw(st.integers(0, 99)), row, stride, count)
    return piece, replace(Recipe(dtype, count, "any bits"), seed=row).pair()[0]


@given(strided_pieces())
def test_sums_are_those_of_the_definition(case: tuple[Piece, Tensor]) -> None:
    piece, elements = case
    bits = bits_of(elements)
    numbers = piece.numbers(torch.arange(piece.count))
    given = (bits, piece.count, piece.key, piece.first, piece.row, piece.stride)
    expected = hashed(piece.key, numbers, bits)
    assert _cpu.delta_sum([given], piece.dtype.itemsize) == expected


def test_a_version_tells_names_dtypes_shapes_places_and_bits_apart() -> None:
    zeros = torch.zeros(6)
    others = [
        {"v": zeros},
        {"w": zeros.view(2, 3)},
        {"w": zeros.int()},
        {"w": torch.tensor([0.0] * 5 + [-0.0])},
        {"w": torch.tensor([0.0] * 4 + [-0.0, 0.0])},
        {"w": torch.zeros(7)},
        {"w": zeros, "v": torch.zeros(6)},
    ]
    assert len({version_of(model).sum for model in [{"w": zeros}, *others]}) == len(others) + 1
    assert version_of({"w": zeros, "v": zeros + 1}) == version_of({"v": zeros + 1, "w": zeros})


# ---- kinds of models


class Tied(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("code", CODES)
def test_modules_and_tied_weights(code: str) -> None:
    here, there = Tied(), Tied()
    there.load_state_dict(here.state_dict())
    before = copied(here.state_dict())
    base = version_of(there.state_dict(), 4)
    old = here.state_dict()
    old = {name: tensor.clone() for name, tensor in old.items()}
    old["head.weight"] = old["embedding.weight"]
    with torch.no_grad():
        here.embedding.weight[::3] *= 1.01
        here.norm.num_batches_tracked += 1
    chunks = list(encode(here.state_dict(), old, code=code, since=base))
    inverse = apply_(there, chunks, since=base)
    assert same(there.state_dict(), here.state_dict())
    assert there.head.weight is there.embedding.weight
    assert inverse.version == version_of(there.state_dict(), 5)
    assert inverse.changed == 10 * 8 + 1
    inverse.undo()
    assert same(there.state_dict(), before)


@pytest.mark.parametrize("was_tied", [False, True])
def test_tensors_that_become_tied_or_no_longer_are(was_tied: bool) -> None:
    """Ties of either side alone leave nothing out."""
    tied, zeros = torch.arange(100.0), torch.zeros(100)
    one, other = {"a": tied, "b": tied}, {"a": zeros, "b": zeros + 1}
    old, new = (one, other) if was_tied else (other, one)
    base = version_of(old)
    target = copied(old)
    inverse = apply_(target, encode(new, old, since=base), since=base)
    assert same(target, new)
    assert inverse.version == version_of(new, 1)
    inverse.undo()
    assert same(target, old)


@pytest.mark.parametrize("appear", [False, True])
def test_a_tied_tensor_appears_or_vanishes(appear: bool) -> None:
    w = torch.arange(100.0)
    one, other = {"a": w}, {"a": w, "b": w}
    old, new = (one, other) if appear else (other, one)
    base = version_of(old)
    target = copied(old)
    inverse = apply_(target, encode(new, old, since=base), since=base)
    assert same(target, new)
    assert inverse.version == version_of(new, 1)
    inverse.undo()
    assert same(target, old)


def test_a_module_keeps_its_tensors() -> None:
    module = nn.Linear(3, 4)
    before = copied(module.state_dict())
    for new in (
        {"weight": before["weight"] + 1},
        {**before, "weight": before["weight"].double()},
        {**before, "bias": before["bias"] + 1, "other": torch.zeros(2)},
    ):
        with pytest.raises(
            VersionError, match=r"version 1 \(.*other tensors than the module, or ties"
        ):
            apply_(module, encode(new, before))
        assert same(module.state_dict(), before)


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("code", CODES)
def test_shards_encoded_apart_make_one_version(code: str, cut: int) -> None:
    """Of a tensor cut along any dimension; whole tensors take all chunks, and a shard its own."""
    old, new = Recipe(torch.bfloat16, 3200, share=0.1, seed=cut).pair()
    old, new = old.view(8, 20, 20), new.view(8, 20, 20)
    half = old.shape[cut] // 2

    def shard_of(tensor: Tensor, rank: int) -> dict[str, Part]:
        """Return a half of a tensor, in its memory."""
        begin, length = (half, tensor.shape[cut] - half) if rank else (0, half)
        starts = tuple(begin * (d == cut) for d in range(3))
        lengths = tuple(length if d == cut else size for d, size in enumerate(tensor.shape))
        piece = piece_of_slice("w", tensor.dtype, tuple(tensor.shape), starts, lengths)
        return {"w": Part(piece, tensor.narrow(cut, begin, length))}

    base, target, shards, chunks = version_of({"w": old}), {"w": old.clone()}, old.clone(), []
    for rank in range(2):
        now, before = shard_of(new, rank), shard_of(old, rank)
        with chunks_of(300):
            made = list(encode_parts(now, before, code, base, 1, (rank, 2)))
        with pytest.raises(VersionError, match="is not whole"):
            apply_(target, made)
        assert same(target, {"w": old})
        parts = shard_of(shards, rank)
        swap_all([found_in(read_chunk(chunk), parts) for chunk in made], parts)
        chunks += made
    assert same({"w": shards}, {"w": new})
    inverse = apply_(target, chunks)
    assert same(target, {"w": new})
    assert inverse.version == version_of({"w": new}, 1)
    inverse.undo()
    assert same(target, {"w": old})


# ---- all or nothing


def two_versions() -> tuple[Model, Model, Model]:
    """Three versions of a model, whose deltas have several chunks."""
    first = {
        "a": Recipe(torch.bfloat16, 3000, seed=1).pair()[0],
        "b": laid_out(Recipe(torch.float32, 1000, rank=2).pair()[0], "transposed"),
        "c": torch.arange(50),
    }
    versions = [first]
    for step in (1, 2):
        new = copied(versions[-1])
        for tensor in new.values():
            bits_of(tensor)[::5] += step
        versions.append({**new, f"new.{step}": torch.ones(200) * step})
    return versions[0], versions[1], versions[2]


FIRST, SECOND, THIRD = two_versions()
ONE, TWO, THREE = version_of(FIRST, 1), version_of(SECOND, 2), version_of(THIRD, 3)


OTHER_BASE = r"does not fit|is not there|but it is"


def chunks_between(
    new: Model, old: Model, since: Version, code: str = "exponents", **options: Any
) -> list[bytes]:
    with chunks_of(800):
        return list(encode(new, old, code=code, since=since, **options))


def refused(chunks: Iterable[bytes], match: str | None = None) -> None:
    """Chunks raise an error, and the weights stay what they were."""
    for threads in (1, 3):
        target = copied(FIRST)
        there = dict(target)
        with using(ISAS[-1], threads), pytest.raises(VersionError, match=match):
            apply_(target, list(chunks))
        assert same(target, FIRST)
        assert all(target[name] is there[name] for name in there)


def test_a_chunk_is_missing_or_there_twice() -> None:
    chunks = chunks_between(SECOND, FIRST, ONE)
    assert len(chunks) > 5
    for i in range(len(chunks)):
        refused(chunks[:i] + chunks[i + 1 :], match="is not whole")
        refused([*chunks, chunks[i]])
    refused([], match="there are no chunks")


def test_chunks_of_several_versions() -> None:
    """Also where the second delta fits once the first is written."""
    first, second = chunks_between(SECOND, FIRST, ONE), chunks_between(THIRD, SECOND, TWO)
    refused(first + second, match="chunks of different versions|is not there|does not fit")
    refused(second + first, match="chunks of different versions|does not fit")
    refused(first[:-1] + second[-1:], match="chunks of different versions")
    refused(second, match="does not fit|is not there")


def test_chunks_of_other_shards() -> None:
    whole = chunks_between(SECOND, FIRST, ONE)
    half = chunks_between(SECOND, FIRST, ONE, shard=(0, 2))
    refused(half, match="of shard 1 there are 0 chunks")
    refused(whole[:3] + half[3:], match="chunks of different versions")
    refused(half * 9, match=r"there are 144 chunks, of which the first are \[0, 0, 0\], and")


@pytest.mark.parametrize("code", CODES)
def test_another_base(code: str) -> None:
    """A change of an element that the delta changes is always seen, and so are other tensors."""
    chunks = chunks_between(SECOND, FIRST, ONE, code)
    others = []
    for name in FIRST:
        other = copied(FIRST)
        bits_of(other[name])[0] += 3
        others.append(other)
    others.append({name: tensor for name, tensor in FIRST.items() if name != "b"})
    others.append({**FIRST, "c": FIRST["c"].int()})
    others.append({**FIRST, "c": FIRST["c"][:40]})
    for other in others:
        target = copied(other)
        with pytest.raises(VersionError, match=OTHER_BASE):
            apply_(target, chunks)
        assert same(target, other)
        with pytest.raises(VersionError, match=OTHER_BASE):
            written(other, chunks)
    target = copied(FIRST)
    with pytest.raises(VersionError, match=r"version 1 \(.*but the weights are version 5"):
        apply_(target, chunks, since=replace(ONE, number=5))
    with pytest.raises(VersionError, match="but the weights are version 1"):
        apply_(target, chunks, since=replace(ONE, sum=ONE.sum ^ 1))
    assert same(target, FIRST)


def test_a_new_tensor_is_there_already() -> None:
    """What would be overwritten is not the base, or it comes back."""
    target = {**copied(FIRST), "new.1": torch.zeros(5)}
    before = copied(target)
    with suppress(VersionError):
        apply_(target, chunks_between(SECOND, FIRST, ONE)).undo()
    assert same(target, before)


def test_a_tensor_that_should_go_is_not_there() -> None:
    for gone in (torch.zeros(5), torch.zeros(0)):
        chunks = chunks_between(SECOND, {**FIRST, "gone": gone}, ONE)
        refused(chunks)


def test_the_source_of_chunks_may_fail() -> None:
    def chunks() -> Iterable[bytes]:
        yield from chunks_between(SECOND, FIRST, ONE)[:3]
        raise OSError("the network is gone")

    target = copied(FIRST)
    with pytest.raises(OSError, match="the network is gone"):
        apply_(target, chunks())
    assert same(target, FIRST)


# ---- damage


def damaged(data: bytearray, random: random.Random) -> None:
    """Flip a bit, set some bytes, or copy some to another place."""
    place, length = random.randrange(len(data)), random.choice([1, 2, 8])
    match random.randrange(3):
        case 0:
            data[place] ^= 1 << random.randrange(8)
        case 1:
            data[place : place + length] = random.randbytes(len(data[place : place + length]))
        case _:
            begin = random.randrange(len(data))
            piece = data[begin : begin + length]
            data[place : place + len(piece)] = piece[: len(data) - place]


@given(codes, st.randoms(use_true_random=False))
def test_bytes_that_change_on_their_way(code: str, random: random.Random) -> None:
    chunks = chunks_between(SECOND, FIRST, ONE, code)
    i = random.randrange(len(chunks))
    changed = bytearray(chunks[i])
    if random.random() < 0.3:
        del changed[random.randrange(len(changed)) :]
    else:
        damaged(changed, random)
    chunks[i] = bytes(changed)
    _right_or_refused(chunks, FormatError)


@given(codes, st.randoms(use_true_random=False))
def test_streams_of_a_hostile_chunk(code: str, random: random.Random) -> None:
    """The checksum does not tell, but the decoder or the sum of the version does."""
    chunks = chunks_between(SECOND, FIRST, ONE, code)
    i = random.randrange(len(chunks))
    chunks[i] = repacked(chunks[i], lambda _, rest: damaged(rest, random))
    _right_or_refused(chunks)


def _right_or_refused(chunks: list[bytes], error: type[Exception] = SparcelError) -> None:
    target = copied(FIRST)
    try:
        apply_(target, chunks)
    except error:
        assert same(target, FIRST)
    else:
        assert same(target, SECOND)


HOSTILE = (None, True, -1, 0, 1, 7, 2**31, 2**62, 2**63, 2**64, 1e400, 0.5, "", "a", "-f", [], {})
FIELDS = (
    *("base", "target", "shard", "part", "last", "code", "dtype", "tensors", "cuts", "new"),
    *("limits", "changes", "shift", "nibbles", "streams", "ties", "untied"),
)
WAYS = ("steps", "nibbles", "values", "dense", "xor", "removed")


@given(
    codes,
    st.integers(0, 99),
    st.sampled_from(FIELDS),
    st.sampled_from(HOSTILE) | st.sampled_from([*WAYS, "int64"]),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_headers_of_a_hostile_chunk(
    code: str, which: int, field: str, value: Any, path: list[int]
) -> None:
    """Any field may be anything, at any depth: nothing but sparcel's own errors come of it."""
    chunks = chunks_between(SECOND, FIRST, ONE, code)

    def change(header: dict[str, Any], _: bytearray) -> None:
        there, key = header, field
        for step in path:
            if isinstance(there[key], list) and there[key]:
                there, key = there[key], step % len(there[key])
        there[key] = value

    i = which % len(chunks)
    chunks[i] = repacked(chunks[i], change)
    target = copied(FIRST)
    try:
        apply_(target, chunks)
    except SparcelError:
        assert same(target, FIRST)
    else:
        # What a header says of numbers of versions, nobody can check.
        assert all(same({"w": target[name]}, {"w": SECOND[name]}) for name in FIRST)


@pytest.mark.parametrize("field", FIELDS)
def test_fields_are_missing(field: str) -> None:
    (chunk,) = encode({"w": torch.ones(9)}, {"w": torch.zeros(9)})
    with pytest.raises(FormatError, match="a chunk's header is wrong"):
        read_chunk(repacked(chunk, lambda header, _: header.pop(field)))


@pytest.mark.parametrize(
    "change",
    [
        {"shard": []},
        {"shard": [0]},
        {"shard": [3, 2]},
        {"shard": [0, 0]},
        {"cuts": [[0, 9, 0, 1]]},
        {"cuts": [[1, 9, 9, 9]]},
        {"cuts": [[1, 9]]},
        {"cuts": [[0, 9, 2, 1]]},
        {"cuts": [[], []]},
        {"tensors": [[1, ["w"], [2**31 + 1], []]]},
        {"tensors": [[2, ["w"], [9], []], [1, ["v"], [9], []]], "cuts": [[]]},
        {"tensors": [[2, ["w", ""], [9], [[1]]]]},
        {"tensors": [[1, ["w", ""], [9], [[1, 2]]]]},
        {"tensors": [[1, ["w"], [9], [[1]]]]},
        {"tensors": [[1, ["w", ""], [9], [["x"]]]]},
        {"tensors": [[1, [["w"]], [9], []]]},
        {"tensors": [[10**9, ["w"], [9], []]]},
        {"tensors": [[4000, ["w" * 9999, ""], [9], [list(range(4000))]]]},
        {"shift": 32},
        {"shift": 1, "code": "values"},
        {"changes": [10]},
        {"changes": [1, 2]},
        {"changes": []},
        {"changes": [1] * 7, "limits": [6, 5, 4, 3, 2, 1]},
        {"streams": [9]},
        {"limits": [256], "changes": [1, 1]},
        {"changes": [1, 1, 1], "limits": [3, 4]},
        {"dtype": "quaternion"},
        {"dtype": "complex128"},
        {"dtype": "quint8"},
        {"dtype": "quint4x2"},
        {"dtype": "int32", "limits": [3], "changes": [1, 0]},
        {"tensors": [[1, ["w"], [9], []], [1, ["v"], [0], []]]},
        {"tensors": [[2, ["w"], [9], []]], "cuts": [[], [0, 0]]},
        {"tensors": [[5000, ["w"], [9], []]]},
        {"tensors": [[1, ["w"], [2**40, 2**40], []]], "cuts": [[0, 9, 9, 9]]},
        {"tensors": [[1, ["w"], [9], []], [1, ["v"], [0, 2**40, 2**40], []]], "code": "removed"},
        {"changes": [9], "code": "nibbles", "nibbles": 73},
        {"changes": [10], "code": "nibbles", "nibbles": 7},
        {"changes": [], "code": "nibbles", "nibbles": 7},
        {"limits": [3], "changes": [1, 0], "code": "nibbles", "nibbles": 7},
        {"nibbles": 1},
        {"changes": [2**62, 2**62], "code": "xor"},
        {"changes": [1], "code": "removed"},
        {"cuts": [[0]]},
        {"code": "exponents"},
        {"new": True},
        {"code": "values", "limits": [3], "changes": [1, 0]},
    ],
    ids=lambda change: str(change)[:60],
)
def test_headers_that_contradict_themselves(change: dict[str, Any]) -> None:
    old = {"w": torch.arange(9).float()}
    chunk = next(encode({"w": old["w"] + (old["w"] == 4)}, old))
    with pytest.raises(FormatError, match="a chunk's header is wrong"):
        read_chunk(repacked(chunk, lambda header, _: header.update({"code": "steps", **change})))


def test_elements_that_several_processes_encode() -> None:
    """The sum would count them twice; of new ones, as many others would be missing."""
    old, new = {"w": torch.zeros(9)}, {"w": torch.ones(9)}
    chunks = [chunk for shard in range(2) for chunk in encode(new, old, shard=(shard, 2))]
    with pytest.raises(VersionError, match=r"version 1 has elements of w twice; one process"):
        apply_(old, chunks)
    assert not old["w"].any()
    cuts = [(0, 12), (0, 6), (6, 12)]
    slices = [piece_of_slice("w", torch.float32, (24,), (a,), (b - a,)) for a, b in cuts]
    parts = [{"w": Part(one, torch.ones(one.count))} for one in slices]
    start = Version(0, 0)
    chunks = [
        chunk
        for shard, one in enumerate(parts)
        for chunk in encode_parts(one, {}, "steps", start, 1, (shard, 3))
    ]
    target = Model()
    with pytest.raises(FormatError, match="in part only, or in part twice"):
        apply_(target, chunks)
    assert not target


def test_a_header_is_not_unpacked_without_end() -> None:
    with pytest.raises(FormatError, match="longer than"):
        read_chunk(framed(bytes(20 << 20), bytes(16)))


@pytest.mark.parametrize("shape", [[2**45], [2**31, 2**31], [3]], ids=str)
def test_a_new_tensor_of_which_little_is_there(shape: list[int]) -> None:
    """No room is made for what a header only says."""
    bits, key = torch.zeros(1, dtype=torch.int16), key_of("w", torch.bfloat16, tuple(shape))

    def change(header: dict[str, Any], _: bytearray) -> None:
        total = hashed(key, torch.zeros(1), bits)
        header.update(tensors=[[1, ["w"], shape, []]], cuts=[[0, 1]], sum=total)

    (chunk,) = encode({"w": torch.zeros(1).bfloat16()}, {})
    target = Model()
    with pytest.raises(FormatError, match="'w' is there in part only"):
        apply_(target, [repacked(chunk, change)])
    assert not target


def test_many_small_tensors() -> None:
    """A chunk's header names few enough that it can be read, and names may be too long for it."""
    old = {f"w{i}": torch.zeros(2) for i in range(70)}
    new = {name: tensor + 1 for name, tensor in old.items()}
    with patch("sparcel.delta.encoding.MOST_PIECES", 50):
        chunks = list(encode(new, old))
    assert [len(read_chunk(chunk).pieces) for chunk in chunks] == [50, 20]
    with (
        patch("sparcel.delta.header.MOST_PIECES", 49),
        pytest.raises(FormatError, match="more than 49 pieces"),
    ):
        apply_(old, chunks)
    apply_(old, chunks)
    assert same(old, new)
    with pytest.raises(InputError, match="names take"):
        list(encode({"w" * (20 << 20): torch.ones(1)}, {}))


def test_a_header_with_many_dimensions() -> None:
    """They are not multiplied before they are counted."""

    def change(header: dict[str, Any], _: bytearray) -> None:
        header.update(tensors=[[1, ["w"], [9] * 100, []]])

    (chunk,) = encode({"w": torch.zeros(9)}, {})
    with pytest.raises(FormatError, match="100 dimensions"):
        read_chunk(repacked(chunk, change))


def test_a_tensor_that_left_before_it_is_removed() -> None:
    """Nothing is written then."""
    old = {"a": torch.zeros(9), "b": torch.zeros(9)}
    prepared = prepare(old, list(encode({"a": torch.ones(9)}, old)))
    del old["b"]
    with pytest.raises(VersionError, match="'b' was replaced"):
        prepared.apply()
    assert not old["a"].any()


def test_what_a_version_ties_is_undone_where_it_is_apart() -> None:
    base, tied = torch.zeros(2, 2), torch.ones(2, 2)
    chunks = list(encode({"a": tied, "b": tied}, {"a": base, "b": base}))
    module = nn.ParameterDict({"a": torch.zeros(2, 2), "b": torch.full((2, 2), 7.0)})
    inverse = apply_(module, chunks)
    assert same(module.state_dict(), {"a": tied, "b": tied})
    inverse.undo()
    assert same(module.state_dict(), {"a": base, "b": torch.full((2, 2), 7.0)})


def test_chunks_are_looked_at_a_few_times() -> None:
    """However many shards there are."""

    class Counted(list[Chunk]):
        times = 0

        def __iter__(self) -> Iterator[Chunk]:
            self.times += 1
            return super().__iter__()

    nothing = read_chunk(next(encode({}, {})))
    chunks = Counted(replace(nothing, shard=shard, shards=500) for shard in range(500))
    check_together(chunks)
    assert chunks.times <= 3


# ---- where tensors are


def test_empty_shards_are_tied_as_others() -> None:
    """A rank may hold none of a tensor; ties must be the same on all ranks."""
    piece = piece_of_slice("w", torch.float32, (1, 8), (1, 0), (0, 8))
    one, other = torch.zeros(1, 8)[1:], torch.zeros(1, 8)[1:]
    parts = {"a": Part(piece, one), "b": Part(piece, one.detach()), "c": Part(piece, other)}
    kept = {name: Part(piece, local) for name, local in base_copy(parts).items()}
    assert ties_of(parts) == ties_of(kept) == {"b": "a"}


def test_shards_that_hold_nothing_of_a_tensor_tell_nothing() -> None:
    piece = piece_of_slice("w", torch.float32, (1, 8), (1, 0), (0, 8))
    part = {"w": Part(piece, torch.zeros(0, 8))}
    for now, old in (({}, part), (part, {})):
        (chunk,) = encode_parts(now, old, "steps", ONE, 2, (1, 2))
        assert not read_chunk(chunk).pieces


PLACES = torch.arange(200.0)

views = st.builds(
    lambda begin, rows: PLACES.as_strided([n for n, _ in rows], [step for _, step in rows], begin),
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3),
)


@given(st.lists(views, min_size=1, max_size=4))
def test_tensors_that_share_elements_are_refused(tensors: list[Tensor]) -> None:
    """Others are not, however they lie between one another; tied ones are one tensor."""
    alone = {(t.storage_offset(), t.shape, t.stride()): t.flatten().tolist() for t in tensors}
    places = [place for mine in alone.values() for place in mine]
    parts = parts_of({str(i): tensor for i, tensor in enumerate(tensors)})
    if len(set(places)) == len(places):
        check_writable(parts, {})
    else:
        with pytest.raises(InputError, match=r"share elements|several elements of \d are"):
            check_writable(parts, {})


def test_columns_of_a_matrix_are_written() -> None:
    """They lie between one another, and share nothing."""
    matrix = torch.zeros(100, 300)
    target = dict(zip("qkv", matrix.split(100, 1), strict=True))
    apply_(target, encode({name: torch.ones(100, 100) for name in "qkv"}, target))
    assert bool((matrix == 1).all())


def test_changes_are_not_assigned_to_tensors_that_share_elements() -> None:
    change = Change("w", torch.float32, (4,), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    one = torch.zeros(1)
    with pytest.raises(InputError, match="several elements of w are one"):
        assign_({"w": one.expand(4)}, [change])
    with pytest.raises(InputError, match="share elements, but are not tied as one"):
        assign_({"w": one, "v": one.view(1, 1)}, [change])


@pytest.mark.parametrize(
    ("indices", "values"),
    [
        ([-1], torch.ones(1)),
        ([0, 4], torch.ones(2)),
        ([0, 1], torch.ones(1)),
        ([0], torch.ones(2)),
        ([0], torch.ones(1).int()),
        ([0], torch.ones(1).bfloat16()),
    ],
)
def test_changes_that_are_none_of_the_tensor(indices: list[int], values: Tensor) -> None:
    mirror = {"w": torch.zeros(4)}
    change = Change("w", torch.float32, (4,), torch.tensor(indices), values)
    with pytest.raises(InputError, match=r"^w (is|changes) "):
        assign_(mirror, [change])
    assert not mirror["w"].any()


def test_a_step_is_made_once_and_where_it_was_prepared() -> None:
    old, new = {"w": torch.zeros(9)}, {"w": torch.ones(9)}
    prepared = prepare(old, encode(new, old))
    inverse = prepared.apply()
    with pytest.raises(VersionError, match="written already; prepare it again"):
        prepared.apply()
    assert same(old, new)
    old["w"] = old["w"].clone()
    with pytest.raises(VersionError, match="'w' was replaced"):
        inverse.undo()
    module = nn.Linear(2, 2)
    before = copied(module.state_dict())
    prepared = prepare(module, encode({**before, "weight": before["weight"] + 1}, before))
    module.load_state_dict(copied(before), assign=True)
    with pytest.raises(VersionError, match="'weight' was replaced since this delta was prepared"):
        prepared.apply()
    assert same(module.state_dict(), before)


def test_ties_are_told_under_each_name() -> None:
    """Of those in force, not of those that come; whoever has one of the names follows."""
    w = torch.zeros(9)
    old, new = {"a": w, "b": w, "c": torch.zeros(9)}, {"a": w + 1}
    new |= {"b": new["a"], "c": new["a"]}
    inverse = apply_(dict(old), encode(new, old))
    for name in "abc":
        mirror = {name: torch.zeros(9)}
        changes = [change for change in inverse.changes() if change.values is not None]
        assign_(mirror, changes)
        assert same(mirror, {name: torch.ones(9)})
        assert sum(len(change.indices) for change in changes if change.name == name) == 9


def test_a_module_in_which_a_tie_cannot_hold() -> None:
    """Its tensors are copies of one another, or it is refused before anything is written."""
    w = torch.zeros(2, 2)
    tied = torch.ones(2, 2)
    chunks = list(encode({"a": tied, "b": tied}, {"a": w, "b": w}))
    module = nn.ParameterDict({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)})
    apply_(module, chunks)
    assert same(module.state_dict(), {"a": tied, "b": tied})
    module = nn.ParameterDict({"a": torch.zeros(2, 2), "b": torch.zeros(2, 3)})
    with pytest.raises(VersionError, match="ties b to a, which is unlike it"):
        apply_(module, chunks)
    assert not module["a"].any()


def test_modules_are_weights() -> None:
    here, there = nn.Linear(3, 4), nn.Linear(3, 4)
    assert version_of(here) == version_of(here.state_dict())
    chunks = list(encode(here, there, code="steps"))
    assert {change.name for chunk in chunks for change in decode(chunk, there)} == {
        "weight",
        "bias",
    }
    apply_(there, chunks)
    assert same(there.state_dict(), here.state_dict())


# ---- arguments


class Packed(torch.Tensor):
    """A tensor that keeps its values in another one, as those of quantised weights do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Packed:
        kind: Any = torch.Tensor
        made: Packed = kind._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


def test_arguments() -> None:
    old, new = {"w": torch.zeros(1000)}, {"w": torch.arange(1000) % 9 / 8}
    with pytest.raises(InputError, match="did you mean 'steps'"):
        next(encode(new, old, code="step"))
    wrong = {
        "complex128, which deltas do not know": torch.zeros(2, dtype=torch.complex128),
        "quint8, which deltas do not know": torch.empty(2, dtype=torch.quint8),
        "layout torch.sparse_coo": torch.zeros(2).to_sparse(),
        "on the device meta": torch.zeros(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "Packed, which keeps its values in other": Packed(torch.zeros(2)),
    }
    for error, tensor in wrong.items():
        with pytest.raises(InputError, match=f"w is .*{error}"):
            next(encode({"w": tensor}, {}))
    with pytest.raises(InputError, match=r"weight has no shape yet; run the module once"):
        version_of(nn.LazyLinear(3))
    for weights in (None, [torch.zeros(3)], nn.Linear(2, 2).named_parameters()):
        with pytest.raises(InputError, match=r"weights are a module, or .*, got \w+$"):
            version_of(weights)  # type: ignore[arg-type]
    for target in (-1, 1 << 63, 1.5, "3"):
        with pytest.raises(InputError, match=r"^target must"):
            next(encode(new, old, target=target))  # type: ignore[arg-type]
    for shard in ((2, 2), (-1, 2), (0, 0), (0, 1 << 20)):
        with pytest.raises(InputError, match=r"^shard\[\d\] must"):
            next(encode(new, old, shard=shard))
    with pytest.raises(InputError, match="pass a list of chunks"):
        apply_(old, next(encode(new, old)))  # type: ignore[arg-type]
    chunk = next(encode({"w": old["w"] + (torch.arange(1000) % 50 == 0)}, old, code="steps"))
    with pytest.raises(InputError, match="this chunk needs the old weights"):
        list(decode(chunk))


def test_kernels_check_what_they_are_given() -> None:
    words = torch.zeros(70, dtype=torch.int16)
    piece, unknown = (words, 70, 1, 0, 70, 70), (None, 70, 1, 0, 70, 70)
    data = torch.zeros(64, dtype=torch.uint8).numpy()
    bad_decodes: list[tuple[Any, ...]] = [
        ([piece], 4, True, 7, "steps", 0, [], [1], data, 8, 16, 24),
        ([piece], 3, True, 7, "steps", 0, [], [1], data, 8, 16, 24),
        ([piece], 2, True, 16, "steps", 0, [], [1], data, 8, 16, 24),
        ([piece], 2, True, 7, "steps", 0, [], [71], data, 8, 16, 24),
        ([piece], 2, True, 7, "steps", 0, [3], [2**63, 2**63 + 1], data, 8, 16, 24),
        ([piece], 2, True, 7, "steps", 0, [], [], data, 8, 16, 24),
        ([piece], 2, True, 7, "steps", 0, [1], [1], data, 8, 16, 24),
        ([piece], 2, True, 7, "steps", 0, [*range(6)], [1] * 7, data, 8, 16, 24),
        ([unknown], 2, True, 7, "steps", 0, [3], [1, 1], data, 8, 16, 24),
        ([piece], 2, True, 7, "steps", 0, [], [1], data, 17, 16, 24),
        ([piece], 2, True, 7, "steps", 0, [], [1], data, 8, 25, 24),
        ([piece], 2, True, 7, "steps", 0, [], [1], data, 8, 16, 33),
        ([piece], 2, True, 7, "others", 0, [], [1], data, 8, 16, 24),
        ([piece], 2, True, 7, "steps", 16, [], [1], data, 8, 16, 24),
        ([piece], 2, True, 7, "nibbles", 0, [3], [1, 1], data, 8, 16, 24),
        ([piece], 2, True, 7, "nibbles", 0, [], [281], data, 8, 16, 24),
        ([unknown], 2, True, 7, "nibbles", 0, [], [1], data, 8, 16, 24),
        ([(words, 70, 1, 0, 0, 70)], 2, True, 7, "steps", 0, [], [1], data, 8, 16, 24),
        ([(None, 2**31 + 1, 1, 0, 1, 1)], 2, True, 7, "steps", 0, [], [1], data, 8, 16, 24),
    ]
    for arguments in bad_decodes:
        with pytest.raises((ValueError, TypeError)):
            _cpu.delta_decode(*arguments)
    assert _cpu.delta_decode([piece], 2, True, 7, "steps", 0, [], [1], data, 8, 16, 24) is None
    place = torch.tensor([70], dtype=torch.int32)
    for wrong in (place, -place):
        with pytest.raises(ValueError, match="places must lie in the chunk"):
            _cpu.delta_swap([piece], wrong, words[:1])
    with pytest.raises(ValueError, match="as many old elements as new"):
        _cpu.delta_encode([piece], [unknown], 2, True, 7, 1, True)
