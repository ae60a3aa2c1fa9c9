"""Chunks make the new weights of the old ones, bit by bit, and the same bytes everywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sparcel import _cpu
from sparcel.errors import InputError, VersionError
from sparcel.products.delta import (
    Version,
    apply_,
    decode,
    encode,
    version_of,
)
from sparcel.products.delta.elements import Piece, hashed
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
    models,
    recipes,
    same,
)
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
    with patch("sparcel.products.delta.decoding.on_host", lambda *_: False):
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
