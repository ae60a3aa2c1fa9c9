"""Chunks make a version as a whole or not at all, whatever has become of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparcel.errors import FormatError, InputError, SparcelError, VersionError
from sparcel.products.delta import (
    Version,
    apply_,
    decode,
    encode,
    prepare,
    version_of,
)
from sparcel.products.delta.applying import check_together
from sparcel.products.delta.chunk import Chunk, read_chunk
from sparcel.products.delta.elements import hashed, key_of, piece_of_slice
from sparcel.products.delta.encoding import encode_parts
from sparcel.products.delta.parts import Part
from tests.delta.pairs import (
    CODES,
    Model,
    Recipe,
    bits_of,
    chunks_of,
    codes,
    copied,
    laid_out,
    same,
)
from tests.delta.repacking import framed, repacked
from tests.kernels.paths import ISAS, using

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
            [list(decode(chunk, other)) for chunk in chunks]
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
    with patch("sparcel.products.delta.encoding.MOST_PIECES", 50):
        chunks = list(encode(new, old))
    assert [len(read_chunk(chunk).pieces) for chunk in chunks] == [50, 20]
    with (
        patch("sparcel.products.delta.header.MOST_PIECES", 49),
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
