"""What deltas, weights and publishers must satisfy."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparcel._checks import whole_number
from sparcel.delta.bits import layout_of
from sparcel.delta.chunk import Chunk, Version
from sparcel.delta.decoding import FETCH
from sparcel.delta.files import METADATA
from sparcel.delta.parts import Part, Weights, local_of, untied
from sparcel.errors import InputError, VersionError


def check_pace(anchor_every: int, lag: int) -> None:
    """Raise InputError unless a publisher can publish and prune so often."""
    whole_number(anchor_every, "anchor_every", at_least=1)
    whole_number(lag, "lag", at_least=0)


def check_together(chunks: list[Chunk]) -> None:
    """Raise VersionError unless chunks are all those of one version."""
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
        parts = [chunk.part for chunk in shards[shard]]
        last = [chunk.part for chunk in shards[shard] if chunk.last]
        if not parts or parts != list(range(len(parts))) or last != parts[-1:]:
            raise VersionError(
                f"version {first.target} is not whole: of shard {shard} there are chunks {parts},"
                f" and the last one is {last}; fetch it again"
            )
    pieces = Counter(p for chunk in chunks if chunk.code != "removed" for p in chunk.pieces)
    twice = [piece.name for piece, times in pieces.items() if times > 1 and piece.count]
    if twice:
        raise VersionError(
            f"version {first.target} has elements of {twice[0]} twice; one process encodes them, of"
            " those that hold the same"
        )


def check_names(
    module: bool,
    version: Version,
    there: Set[str],
    added: Set[str],
    leaving: Set[str],
) -> None:
    """Raise VersionError unless tensors can appear and vanish as a delta says."""
    if module and (added or leaving):
        names = ", ".join(sorted(added | leaving)[:3])
        raise VersionError(
            f"version {version} has other tensors than the module, or ties others: {names}; begin"
            " with a module that has its tensors and ties"
        )
    already, missing = sorted(added & there - leaving), sorted(leaving - there)
    if already or missing:
        raise VersionError(
            f"these weights are not the base of version {version}: {already[:3]} are there already,"
            f" and {missing[:3]} are not; {FETCH}"
        )


def check_copies(version: Version, copies: Mapping[str, str], parts: Mapping[str, Part]) -> None:
    """Raise VersionError unless tensors that a version ties are alike where they are not tied."""
    for alias, name in copies.items():
        if replace(parts[alias].piece, name=name) != parts[name].piece:
            raise VersionError(f"version {version} ties {alias} to {name}, which is unlike it here")


@dataclass(frozen=True)
class _Held:
    """Bytes that a tensor holds: runs of one length, in rows at distances, each along a dimension.

    ``rows`` has for each dimension how many there are, and their distance, from the shortest on.
    """

    name: str
    device: torch.device
    begin: int
    run: int
    rows: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.begin + self.run + sum((count - 1) * distance for count, distance in self.rows)

    @property
    def plain(self) -> bool:
        """Whether each row ends before the next one of its dimension begins, so none overlap."""
        end = self.run
        for count, distance in self.rows:
            if distance < end:
                return False
            end += (count - 1) * distance
        return True


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
    held = [_held(name, part.local) for name, part in untied(parts).items() if part.local.numel()]
    held.sort(key=lambda one: (str(one.device), one.begin))
    near: list[_Held] = []
    end = 0
    for one in held:
        if near and (one.device != near[0].device or one.begin >= end):
            _check_apart(near)
            near, end = [], 0
        near.append(one)
        end = max(end, one.end)
    _check_apart(near)


def _check_inside(module: nn.Module, parts: Mapping[str, Part]) -> None:
    """Raise InputError unless parts of a state dict lie where the module's own tensors do."""
    own = (one for one in chain(module.parameters(), module.buffers()) if not is_lazy(one))
    dense = (local_of(one) for one in own if one.layout == torch.strided)
    memory = {one.untyped_storage().data_ptr() for one in dense if one.data_ptr()}
    for name, part in parts.items():
        if part.local.numel() and part.local.untyped_storage().data_ptr() not in memory:
            raise InputError(
                f"{name} is a copy that the module's state_dict makes, or a tensor that is no"
                " buffer, so what is written to it may not reach the module; register it, pass"
                " tensors by name, or load_state_dict what a Subscriber without tensors has"
            )


def _held(name: str, local: Tensor) -> _Held:
    size = local.element_size()
    if local.is_contiguous():
        return _Held(name, local.device, local.data_ptr(), local.numel() * size, ())
    run = size
    rows: list[tuple[int, int]] = []
    for distance, count in sorted(zip(local.stride(), local.shape, strict=True)):
        if distance * size == run and not rows:
            run *= count
        elif count > 1:
            rows.append((count, distance * size))
    return _Held(name, local.device, local.data_ptr(), run, tuple(rows))


def _check_apart(near: list[_Held]) -> None:
    """Raise InputError if tensors whose ranges overlap share a byte, or one does with itself."""
    if len(near) < 2 and all(one.plain for one in near):
        return
    # Columns of a matrix lie between one another; a unit is as long as all that is in one place.
    first = near[0].begin
    distances = [distance for one in near for _, distance in one.rows]
    unit = math.gcd(*(one.begin - first for one in near), *(one.run for one in near), *distances)
    taken = np.zeros((max(one.end for one in near) - first) // unit, np.int32)
    for number, one in enumerate(near, 1):
        shape = [*(count for count, _ in one.rows), one.run // unit]
        steps = [*(distance // unit * taken.itemsize for _, distance in one.rows), taken.itemsize]
        mine = np.lib.stride_tricks.as_strided(taken[(one.begin - first) // unit :], shape, steps)
        other = int(mine.max())
        mine[...] = number
        if other:
            raise InputError(
                f"{near[other - 1].name} and {one.name} share elements, but are not tied as one"
                " tensor; pass a copy of one of them"
            )
        if not one.plain and np.count_nonzero(taken == number) < mine.size:
            raise InputError(f"several elements of {one.name} are one in memory; pass a copy of it")


def check_published(parts: Mapping[str, Part]) -> None:
    """Raise InputError unless there are tensors, and a store can hold a whole model of them."""
    if not parts:
        raise InputError("there are no tensors to publish; did a filter leave all names out?")
    for name, part in parts.items():
        if name == METADATA or not _is_unicode(name):
            why = "keep for themselves" if name == METADATA else "cannot encode"
            raise InputError(
                f"{name!r} is a name that safetensors files {why}; publish the tensor under another"
            )
        if layout_of(part.piece.dtype).safetensors is None:
            raise InputError(
                f"{name} is of {part.piece.dtype}, for which safetensors has no name; view it as"
                " another dtype"
            )


def _is_unicode(name: str) -> bool:
    """Tell whether a name is text, and has no halves of characters (surrogates)."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
