"""Chunks are applied to weights of every kind: modules, ties, shards and views."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sparcel.errors import InputError, VersionError
from sparcel.products.delta import (
    Change,
    Version,
    apply_,
    assign_,
    decode,
    encode,
    prepare,
    version_of,
)
from sparcel.products.delta.applying import check_writable
from sparcel.products.delta.base import copied as base_copy
from sparcel.products.delta.chunk import read_chunk
from sparcel.products.delta.decoding import found_in
from sparcel.products.delta.elements import piece_of_slice
from sparcel.products.delta.encoding import encode_parts
from sparcel.products.delta.parts import Part, parts_of, ties_of
from sparcel.products.delta.prepared import swap_all
from tests.delta.pairs import (
    CODES,
    Model,
    Recipe,
    chunks_of,
    copied,
    same,
)

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


def goes_and_returns(old: Model, new: Model) -> None:
    """Apply a delta, and undo it."""
    base = version_of(old)
    target = copied(old)
    inverse = apply_(target, encode(new, old, since=base), since=base)
    assert same(target, new)
    assert inverse.version == version_of(new, 1)
    inverse.undo()
    assert same(target, old)


@pytest.mark.parametrize("was_tied", [False, True])
def test_tensors_that_become_tied_or_no_longer_are(was_tied: bool) -> None:
    """Ties of either side alone leave nothing out."""
    tied, zeros = torch.arange(100.0), torch.zeros(100)
    one, other = {"a": tied, "b": tied}, {"a": zeros, "b": zeros + 1}
    old, new = (one, other) if was_tied else (other, one)
    goes_and_returns(old, new)


@pytest.mark.parametrize("appear", [False, True])
def test_a_tied_tensor_appears_or_vanishes(appear: bool) -> None:
    w = torch.arange(100.0)
    one, other = {"a": w}, {"a": w, "b": w}
    old, new = (one, other) if appear else (other, one)
    goes_and_returns(old, new)


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


# ---- where tensors are


def test_empty_shards_are_tied_as_others() -> None:
    """A rank may hold none of a tensor; ties must be the same on all ranks."""
    piece = piece_of_slice("w", torch.float32, (1, 8), (1, 0), (0, 8))
    one, other = torch.zeros(1, 8)[1:], torch.zeros(1, 8)[1:]
    parts = {"a": Part(piece, one), "b": Part(piece, one.detach()), "c": Part(piece, other)}
    kept = base_copy(parts)
    assert ties_of(parts) == ties_of(kept) == {"b": "a"}


def test_shards_that_hold_nothing_of_a_tensor_tell_nothing() -> None:
    piece = piece_of_slice("w", torch.float32, (1, 8), (1, 0), (0, 8))
    part = {"w": Part(piece, torch.zeros(0, 8))}
    for now, old in (({}, part), (part, {})):
        (chunk,) = encode_parts(now, old, "steps", Version(1, 0), 2, (1, 2))
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
