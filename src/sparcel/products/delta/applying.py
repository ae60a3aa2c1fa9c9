"""Chunks in, weights out, all or nothing; and changes that were decoded elsewhere."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparcel.core._threads import in_order
from sparcel.core.training.driver import model_names
from sparcel.errors import InputError, VersionError, few, shown
from sparcel.products.delta.chunk import Chunk, Version, read_chunk
from sparcel.products.delta.decoding import FETCH, Change, found_in, new_tensors
from sparcel.products.delta.elements import bits_of
from sparcel.products.delta.parts import (
    Part,
    Weights,
    local_of,
    owners,
    parts_of,
    tensors_of,
    untied,
)
from sparcel.products.delta.prepared import Inverse, Prepared, Target

Chunks: TypeAlias = Iterable[bytes | memoryview | Chunk]


def apply_(target: Target, chunks: Chunks, since: Version | None = None) -> Inverse:
    """Apply all chunks of a version, in any order, in place, or none of them.

    Nothing is written before all is checked: the sum of what each chunk changes, which counts old
    and new bits, must be the one that it states, and every chunk must be there once.

    Parameters
    ----------
    target
        A module, or tensors by name on any device. Tensors that appear or vanish need a mapping.
        DTensors must hold all elements of the chunks' pieces, as they do where they are cut as they
        were when these were encoded.
    chunks
        What `encode` made.
    since
        The version that ``target`` is; by default whatever the chunks say.

    Returns
    -------
    Inverse
        The version that ``target`` is now, and what it was. It holds the place and the old value of
        each changed element: six bytes for one of bfloat16.

    Raises
    ------
    FormatError
        If a chunk is torn or corrupt.
    VersionError
        If the chunks are for another version, or do not belong together.
    InputError
        If ``target`` has tensors that cannot be written element by element, or that have some in
        common without being tied as one. If it is a module whose state dict gives copies, as hooks
        make that cast or join parameters.
    """
    return prepare(target, chunks, since).apply()


def prepare(target: Target, chunks: Chunks, since: Version | None = None) -> Prepared:
    """Decode and check all chunks of a version, and write nothing yet.

    The weights may go on serving meanwhile. What `Prepared.apply` has left to do is to write what
    changes. Parameters and errors are those of `apply_`.
    """
    if isinstance(chunks, bytes | bytearray | memoryview):
        raise InputError("a version may have several chunks: pass a list of chunks")
    read = [one if isinstance(one, Chunk) else read_chunk(one) for one in chunks]
    check_together(read)
    return prepare_read(target, read, since)


def check_together(chunks: list[Chunk], some: bool = False) -> None:
    """Raise VersionError unless chunks are all those of one version, or some and the last ones."""
    if not chunks:
        raise VersionError("there are no chunks to apply; a version has at least one")
    first = chunks[0]
    shards: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in sorted(chunks, key=lambda chunk: chunk.part):
        told = (chunk.base, chunk.target, chunk.shards)
        if told != (first.base, first.target, first.shards):
            raise VersionError(
                f"chunks of different versions: {first.base} to {first.target}, and {chunk.base} to"
                f" {chunk.target}"
            )
        shards[chunk.shard].append(chunk)
    for shard in range(first.shards):
        there = [chunk.part for chunk in shards[shard]]
        last = [chunk.part for chunk in shards[shard] if chunk.last]
        numbers = sorted(set(there)) if some else list(range(len(there)))
        if not there or there != numbers or last != there[-1:]:
            raise VersionError(
                f"version {first.target} is not whole: of shard {shard} there are {len(there)}"
                f" chunks, of which the first are {there[:3]}, and the last one is {last[:3]};"
                " fetch it again"
            )
    pieces = Counter(p for chunk in chunks if chunk.code != "removed" for p in chunk.pieces)
    counts: Counter[str] = Counter()
    for piece, times in pieces.items():
        counts[piece.name] += piece.count * times
    twice = [
        shown(piece.name)
        for piece, times in pieces.items()
        if (times > 1 and piece.count) or counts[piece.name] > piece.size
    ]
    if twice:
        raise VersionError(
            f"version {first.target} has elements of {twice[0]} twice; one process encodes them, of"
            " those that hold the same"
        )


def made_by(chunks: Sequence[Chunk]) -> Version:
    """Return the version that all chunks of a delta make."""
    return chunks[0].base.after(chunks[0].target, sum(chunk.sum for chunk in chunks))


def prepare_read(target: Target, read: Sequence[Chunk], since: Version | None = None) -> Prepared:
    """Do what `prepare` does with chunks that were read, and belong together."""
    base, version = read[0].base, made_by(read)
    if since not in (None, base):
        raise VersionError(
            f"this delta makes version {version} of version {base}, but the weights are version"
            f" {since}; fetch what follows that one, or a full version"
        )
    module = isinstance(target, nn.Module)
    known = set() if module else {piece.name for chunk in read for piece in chunk.pieces}
    tensors = tensors_of(target, known)
    parts = parts_of(tensors)
    check_writable(parts, target)
    found = list(in_order(partial(found_in, parts=parts), read))
    new = new_tensors(one for one in found if one.chunk.new)
    leaving = {name for chunk in read for name in chunk.leaving}
    _check_names(module, version, tensors.keys(), new.keys(), leaving)
    after = {name: tensor for name, tensor in tensors.items() if name not in leaving} | new
    ties = {a: name for chunk in read for a, name in chunk.ties.items() if name in after}
    owner = owners(parts_of(tensors_of(after, None))) if ties else {}
    apart = {alias: name for alias, name in ties.items() if owner.get(alias) != owner[name]}
    copies = {alias: name for alias, name in apart.items() if alias in after} if module else {}
    _check_copies(version, copies, parts)
    if not module:
        after |= {alias: after[name] for alias, name in apart.items()}
    return Prepared(
        base,
        version,
        after,
        sum(chunk.changed for chunk in read),
        target if module else tensors,
        parts,
        [one for one in found if one.chunk.code != "removed" and not one.chunk.new],
        {alias: name for alias, name in ties.items() if alias in after},
        _gone={name: one for name, one in tensors.items() if after.get(name) is not one},
        _added={name: one for name, one in after.items() if tensors.get(name) is not one},
        _copies=copies,
    )


def _check_names(
    module: bool, version: Version, there: Set[str], added: Set[str], leaving: Set[str]
) -> None:
    """Raise VersionError unless a delta's new tensors can appear, and its old ones vanish."""
    if module and (added or leaving):
        names = ", ".join(few(sorted(added | leaving)))
        raise VersionError(
            f"version {version} has other tensors than the module, or ties others: {names}; begin"
            " with a module that has its tensors and ties"
        )
    already, missing = sorted(added & there - leaving), sorted(leaving - there)
    if already or missing:
        raise VersionError(
            f"these weights are not the base of version {version}: {few(already)} are there"
            f" already, and {few(missing)} are not; {FETCH}"
        )


def _check_copies(version: Version, copies: Mapping[str, str], parts: Mapping[str, Part]) -> None:
    """Raise VersionError unless the tensors to tie have the same dtype, shape and shard."""
    for alias, name in copies.items():
        if replace(parts[alias].piece, name=name) != parts[name].piece:
            raise VersionError(
                f"version {version} ties {shown(alias)} to {shown(name)}, which is unlike it here"
            )


def write_in_turn(parts: Mapping[str, Part], chunks: Iterable[Chunk]) -> None:
    """Check and write chunk after chunk, each thread one at a time: little memory is needed.

    After an error some are written, and others not. New tensors are left out.
    """

    def write(chunk: Chunk) -> None:
        found_in(chunk, parts).swap(parts)

    deque(in_order(write, (chunk for chunk in chunks if not chunk.new)), maxlen=0)


def assign_(target: Weights, changes: Iterable[Change], *, partial: bool = False) -> None:
    """Write changes that were decoded and checked elsewhere.

    The target may hold its tensors on any device, and DTensors that are cut in any way: of each
    change it takes what it has.

    Parameters
    ----------
    target
        A module, or tensors by name. What wrappers put into names does not count.
    changes
        From `decode`, or from `Update.changes`, which tells a tied tensor under all its names.
    partial
        Whether what the target does not have is passed by, and what is gone stays as it is.

    Raises
    ------
    InputError
        If a tensor has another dtype or shape, is there under none of its names, or is gone; what
        was written before stays. If the target has tensors that `apply_` refuses.
    """
    given = parts_of(tensors_of(target, None))
    check_writable(given, target)
    parts = {name: given[own] for own, name in model_names(given).items()} | given
    names: dict[str, str] = {}
    gone, found, unknown = set[str](), set[str](), dict[str, str]()
    for change in changes:
        part = parts.get(change.name)
        if part and names.setdefault(part.piece.name, change.name) != change.name:
            raise InputError(
                f"'{shown(names[part.piece.name])}' and '{shown(change.name)}' both change, and"
                f" either may be '{shown(part.piece.name)}' of the weights; name tensors as the"
                " version does, and pass another one that does not begin with 'module.'"
            )
        if change.values is None:
            gone |= {part.piece.name} if part else set()
            continue
        owner = change.tied_to or change.name
        if part is None:
            unknown[change.name] = owner
            continue
        found.add(owner)
        gone.discard(part.piece.name)
        _check_change(part, change.values, change)
        here, places = part.places_of(change.indices)
        part.put(places, bits_of(change.values)[here])
    lacking = sorted(name for name, owner in unknown.items() if owner not in found)
    wrong = [f"{few(lacking)} change and are not in the weights"] if lacking else []
    wrong += [f"{few(sorted(gone))} are gone and still in the weights"] if gone else []
    if wrong and not partial:
        raise InputError(
            f"{', and '.join(wrong)}; name tensors as the version does, or pass partial=True"
        )


def _check_change(part: Part, values: Tensor, change: Change) -> None:
    """Raise InputError unless a change fits the part's tensor."""
    piece, indices = part.piece, change.indices
    kind = piece.dtype, piece.shape
    if kind != (change.dtype, change.shape) or kind != (values.dtype, change.shape):
        raise InputError(
            f"{shown(change.name)} is {piece.dtype} {list(piece.shape)}, and changes as"
            f" {change.dtype} {list(change.shape)} to values of {values.dtype}"
        )
    if indices.shape != values.shape or bool(((indices < 0) | (indices >= piece.size)).any()):
        raise InputError(
            f"{shown(change.name)} changes at {list(indices.shape)} indices to {list(values.shape)}"
            f" values; they must be as many, and below {piece.size}"
        )


def check_writable(parts: Mapping[str, Part], target: Weights) -> None:
    """Raise InputError unless each element of each tensor can be written alone.

    Parameters
    ----------
    parts
        Those of the target.
    target
        A module's tensors must lie in its parameters and buffers.
    """
    if isinstance(target, nn.Module):
        _check_inside(target, parts)
    held = [(name, part.local) for name, part in untied(parts).items() if part.local.numel()]
    held.sort(key=lambda one: (str(one[1].device), one[1].data_ptr()))
    near: list[tuple[str, Tensor]] = []
    for name, local in held:
        if _repeats_elements(local):
            raise InputError(
                f"several elements of {shown(name)} are one in memory; pass a copy of it"
            )
        begin, device = local.data_ptr(), local.device
        near = [(n, one) for n, one in near if one.device == device and _end_of(one) > begin]
        for other, one in near:
            # Columns of a matrix lie between one another, and share nothing.
            if np.shares_memory(_in_its_place(one), _in_its_place(local)):
                raise InputError(
                    f"{shown(other)} and {shown(name)} share elements, but are not tied as one"
                    " tensor; pass a copy of one of them"
                )
        near.append((name, local))


def _check_inside(module: nn.Module, parts: Mapping[str, Part]) -> None:
    """Raise InputError unless parts of a state dict lie where the module's own tensors do."""
    own = (one for one in chain(module.parameters(), module.buffers()) if not is_lazy(one))
    dense = (local_of(one) for one in own if one.layout == torch.strided)
    memory = {one.untyped_storage().data_ptr() for one in dense if one.data_ptr()}
    for name, part in parts.items():
        if part.local.numel() and part.local.untyped_storage().data_ptr() not in memory:
            raise InputError(
                f"{shown(name)} is a copy that the module's state_dict makes, or a tensor that is"
                " no buffer, so what is written to it may not reach the module; register it, pass"
                " tensors by name, or load_state_dict what a Subscriber without tensors has"
            )


def _span(tensor: Tensor) -> int:
    """Return how many elements there are from a tensor's first to its last one in memory."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((count - 1) * distance for count, distance in sides)


def _end_of(tensor: Tensor) -> int:
    return tensor.data_ptr() + _span(tensor) * tensor.element_size()


def _repeats_elements(tensor: Tensor) -> bool:
    """Tell whether several elements of a tensor are one in memory."""
    end, apart = 1, True
    for distance, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1:
            apart = apart and distance >= end
            end += (count - 1) * distance
    if apart:  # along each dimension, what lies inside ends before the next one begins
        return False
    places = torch.arange(_span(tensor)).as_strided(tensor.shape, tensor.stride())
    return len(places.unique()) < tensor.numel()


def _in_its_place(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return an array with a tensor's addresses, which may be a GPU's: it must not be read."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "data": (tensor.data_ptr(), False),
        "shape": tuple(tensor.shape),
        "strides": tuple(distance * size for distance in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
