"""Chunks in, weights out, all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from sparcel import _cpu
from sparcel.delta.bits import bits_of
from sparcel.delta.chunk import Chunk, Version, read_chunk
from sparcel.delta.decoding import (
    Change,
    Found,
    check_sum,
    check_tensor,
    elements_of,
    found_in,
    on_host,
)
from sparcel.delta.encoding import in_threads
from sparcel.delta.parts import Part, owners, parts_of
from sparcel.errors import FormatError, InputError, VersionError


@dataclass
class Inverse:
    """What `apply_` has changed, and how to undo it.

    Attributes
    ----------
    base
        The version that the weights were.
    version
        What they are now.
    changed
        How many elements have changed.
    """

    base: Version
    version: Version
    changed: int
    _tensors: MutableMapping[str, Tensor] = field(repr=False)
    _parts: Mapping[str, Part] = field(repr=False)
    _found: list[Found] = field(repr=False)
    _added: list[str] = field(repr=False)
    _gone: dict[str, Tensor] = field(repr=False)
    _copies: dict[str, str] = field(repr=False)

    def changes(self) -> Iterator[Change]:
        """Yield what has changed in each tensor, with the new values."""
        for name, tensor in self._gone.items():
            nothing = torch.empty(0, dtype=torch.int64)
            yield Change(name, tensor.dtype, tuple(tensor.shape), nothing, None)
        for name in self._added:
            tensor = self._tensors[name]
            everything = torch.arange(tensor.numel())
            values = tensor.detach().reshape(-1)
            yield Change(name, tensor.dtype, tuple(tensor.shape), everything, values, new=True)
        for found in self._found:
            for piece, places, _ in found.pieces():
                numbers = piece.numbers(places.sort().values)
                part = self._parts[piece.name]
                _, local = part.here(numbers.to(part.local.device))
                values = part.local.reshape(-1)[local].cpu()
                yield Change(piece.name, piece.dtype, piece.shape, numbers, values)

    def undo(self) -> None:
        """Make the weights what they were, bit for bit; this can be done once."""
        _undo(self._found, self._parts)
        for name in self._added:
            del self._tensors[name]
        self._tensors.update(self._gone)
        _copy(self._copies, self._tensors)
        self._found, self._added, self._gone = [], [], {}


def apply_(
    target: nn.Module | MutableMapping[str, Tensor],
    chunks: Iterable[bytes | memoryview],
    since: Version | None = None,
) -> Inverse:
    """Apply all chunks of a version, in any order, in place, or none of them.

    Each chunk is checked before it is written: the sum of what it changes, which counts old and new
    bits, must be the one that it states. If one does not check, is missing, or is there twice, what
    was written before is undone.

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
    """
    tensors: MutableMapping[str, Tensor] = (
        target.state_dict() if isinstance(target, nn.Module) else target
    )
    parts = parts_of(tensors)
    _check_writable(parts)
    found: list[Found] = []
    try:
        seen = write_parts(parts, chunks, since, found)
        _check_together(seen)
        added = _added(found)
        leaving = _names(seen, "removed") | {name for chunk in seen for name in chunk.untied}
        _check_names(target, tensors, added, leaving)
    except BaseException:
        _undo(found, parts)
        raise
    gone = {name: tensors.pop(name) for name in leaving}
    tensors.update(added)
    ties = _apart(tensors, {alias: name for chunk in seen for alias, name in chunk.ties.items()})
    if isinstance(target, nn.Module):
        _copy(ties, tensors)
    else:
        fresh = [alias for alias in ties if alias not in tensors]
        gone |= {alias: tensors[alias] for alias in ties if alias in tensors}
        tensors.update({alias: tensors[name] for alias, name in ties.items()})
        added, ties = {**added, **{alias: tensors[alias] for alias in fresh}}, {}
    base = seen[0].base
    version = Version(seen[0].target, (base.sum + sum(chunk.sum for chunk in seen)) % (1 << 64))
    changed = sum(chunk.changed for chunk in seen)
    # The new values are in the weights.
    kept = [replace(one, after=one.after[:0]) for one in found if not one.chunk.new]
    return Inverse(base, version, changed, tensors, parts, kept, list(added), gone, ties)


def assign_(target: nn.Module | MutableMapping[str, Tensor], changes: Iterable[Change]) -> None:
    """Write changes that were decoded and checked elsewhere.

    The target may hold its tensors on any device, and DTensors that are cut in any way: of each
    change it takes what it has.

    Parameters
    ----------
    target
        A module, or tensors by name. Names that it does not have are passed by.
    changes
        From `decode`, or from `Update.changes`.

    Raises
    ------
    InputError
        If a tensor has another dtype or shape; what was written before stays.
    """
    tensors = target.state_dict() if isinstance(target, nn.Module) else target
    parts = parts_of(tensors)
    for change in changes:
        part = parts.get(change.name)
        if part is None or change.values is None:
            continue
        if (part.piece.dtype, part.piece.shape) != (change.dtype, change.shape):
            raise InputError(
                f"{change.name} is {part.piece.dtype} {list(part.piece.shape)}, and changes as"
                f" {change.dtype} {list(change.shape)}"
            )
        here, places = part.here(change.indices)
        part.put(places, bits_of(change.values)[here])


def write_parts(
    parts: Mapping[str, Part],
    chunks: Iterable[bytes | memoryview],
    since: Version | None,
    found: list[Found],
) -> list[Chunk]:
    """Check chunks and write what they change, which is noted in ``found``; return the chunks."""
    seen: list[Chunk] = []
    for _ in in_threads(_jobs(parts, chunks, since, seen, found)):
        pass
    return seen


def _jobs(
    parts: Mapping[str, Part],
    chunks: Iterable[bytes | memoryview],
    since: Version | None,
    seen: list[Chunk],
    found: list[Found],
) -> Iterator[partial[None]]:
    for data in chunks:
        chunk = read_chunk(data)
        if since is not None and chunk.base != since:
            raise VersionError(
                f"this delta makes version {chunk.target} of version {chunk.base}, but the weights"
                f" are version {since}; fetch what follows that one, or a full version"
            )
        seen.append(chunk)
        yield partial(_write, chunk, parts, found)


def _write(chunk: Chunk, parts: Mapping[str, Part], done: list[Found]) -> None:
    """Check a chunk, note what it changes, and write it."""
    if chunk.code == "removed":
        for piece in chunk.pieces:
            check_tensor(chunk, piece, parts)
        old = elements_of(chunk, parts)
        check_sum(chunk, -_cpu.delta_sum(old, chunk.layout.itemsize))
        return
    found = found_in(chunk, None if chunk.new else parts)
    done.append(found)
    if not chunk.new:
        _put(found, found.after, parts)


def _undo(found: list[Found], parts: Mapping[str, Part]) -> None:
    for one in reversed(found):
        if one.before is not None:
            _put(one, one.before, parts)


def _put(found: Found, values: Tensor, parts: Mapping[str, Part]) -> None:
    """Write bits to the changed elements of a chunk."""
    chunk = found.chunk
    in_place = [
        parts[piece.name].local.is_contiguous() and parts[piece.name].begin_of(piece) is not None
        for piece in chunk.pieces
    ]
    if all(in_place) and on_host(chunk, parts):
        _cpu.delta_write(elements_of(chunk, parts), found.places, values)
        return
    for piece, places, which in found.pieces():
        part = parts[piece.name]
        _, local = part.here(piece.numbers(places).to(part.local.device))
        part.put(local, values[which])


def _check_together(chunks: list[Chunk]) -> None:
    if not chunks:
        raise VersionError("there are no chunks to apply; a version has at least one")
    first = chunks[0]
    for chunk in chunks:
        told = (chunk.base, chunk.target, chunk.shards)
        if told != (first.base, first.target, first.shards):
            raise VersionError(
                f"chunks of different versions: {first.base} to {first.target}, and {chunk.base} to"
                f" {chunk.target}"
            )
    for shard in range(first.shards):
        mine = [chunk for chunk in chunks if chunk.shard == shard]
        parts = sorted(chunk.part for chunk in mine)
        last = [chunk.part for chunk in mine if chunk.last]
        if not parts or parts != list(range(len(mine))) or last != parts[-1:]:
            raise VersionError(
                f"version {first.target} is not whole: of shard {shard} there are chunks {parts},"
                f" and the last one is {last}; fetch it again"
            )


def _check_names(
    target: object, tensors: Mapping[str, Tensor], added: Iterable[str], leaving: set[str]
) -> None:
    added = set(added)
    if isinstance(target, nn.Module) and (added or leaving):
        names = ", ".join(sorted(added | leaving))
        raise VersionError(f"a module's tensors cannot appear, vanish or change shape: {names}")
    there = sorted(added & tensors.keys() - leaving)
    missing = sorted(leaving - tensors.keys())
    if there or missing:
        raise VersionError(
            f"these weights are not the base of the delta: {there} are there already, and {missing}"
            " are not; fetch a full version"
        )


def _copy(names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors whose owners are others in a version, but which are not tied to them here."""
    for copy, name in names.items():
        bits_of(tensors[copy]).copy_(bits_of(tensors[name]))


def _check_writable(parts: Mapping[str, Part]) -> None:
    for name, part in parts.items():
        local = part.local
        if any(
            not step and size > 1 for step, size in zip(local.stride(), local.shape, strict=True)
        ):
            raise InputError(f"several elements of {name} are one in memory; pass a copy of it")


def _apart(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, str]:
    """Return the ties between tensors that are not tied here."""
    owner = owners(parts_of(tensors))
    known = {alias: name for alias, name in ties.items() if name in tensors}
    return {alias: name for alias, name in known.items() if owner.get(alias) != owner[name]}


def _names(chunks: Iterable[Chunk], code: str) -> set[str]:
    return {piece.name for chunk in chunks if chunk.code == code for piece in chunk.pieces}


def _added(found: Iterable[Found]) -> dict[str, Tensor]:
    """Put new tensors together from their changes."""
    tensors: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for one in found:
        for change in one.changes() if one.chunk.new else ():
            assert change.values is not None, "new tensors have values"
            tensor = tensors.setdefault(change.name, torch.empty(change.shape, dtype=change.dtype))
            if (tensor.dtype, tuple(tensor.shape)) != (change.dtype, change.shape):
                raise FormatError(f"the new tensor {change.name!r} has pieces of several shapes")
            bits_of(tensor).view(-1)[change.indices] = bits_of(change.values)
            counts[change.name] = counts.get(change.name, 0) + len(change.indices)
    for name, tensor in tensors.items():
        if counts[name] != tensor.numel():
            raise VersionError(f"the new tensor {name!r} is there in part only")
    return tensors
