"""Chunks in, weights out, all or nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from torch import nn

from sparcel.delta.chunk import Chunk, Version, read_chunk
from sparcel.delta.decoding import FETCH, found_in, new_tensors
from sparcel.delta.parts import Part, owners, parts_of, tensors_of
from sparcel.delta.prepared import Inverse, Prepared, Target
from sparcel.delta.threads import in_threads
from sparcel.delta.writable import check_writable
from sparcel.errors import InputError, VersionError, few, shown

Chunks: TypeAlias = Iterable[bytes | memoryview | Chunk]


def write_in_turn(parts: Mapping[str, Part], chunks: Iterable[Chunk]) -> None:
    """Check and write chunk after chunk, each thread one at a time: little memory is needed.

    After an error some are written, and others not. New tensors are left out.
    """

    def write(chunk: Chunk) -> None:
        found_in(chunk, parts).swap(parts)

    for _ in in_threads(partial(write, chunk) for chunk in chunks if not chunk.new):
        pass


def prepare(target: Target, chunks: Chunks, since: Version | None = None) -> Prepared:
    """Decode and check all chunks of a version, and write nothing yet.

    The weights may go on serving meanwhile. What `Prepared.apply` has left to do is to write what
    changes. Parameters and errors are those of `apply_`.
    """
    if isinstance(chunks, bytes | bytearray | memoryview):
        raise InputError("a version may have several chunks: pass a list of chunks")
    module = isinstance(target, nn.Module)
    read = [one if isinstance(one, Chunk) else read_chunk(one) for one in chunks]
    check_together(read)
    known = set() if module else {piece.name for chunk in read for piece in chunk.pieces}
    tensors = tensors_of(target, known)
    parts = parts_of(tensors)
    check_writable(parts, target)
    base = read[0].base
    version = base.after(read[0].target, sum(chunk.sum for chunk in read))
    if since not in (None, base):
        raise VersionError(
            f"this delta makes version {version} of version {base}, but the weights are version"
            f" {since}; fetch what follows that one, or a full version"
        )
    found = list(in_threads(partial(found_in, chunk, parts) for chunk in read))
    new = new_tensors(one for one in found if one.chunk.new)
    leaving = {name for chunk in read for name in chunk.leaving}
    _check_names(module, version, tensors.keys(), new.keys(), leaving)
    after = {name: tensor for name, tensor in tensors.items() if name not in leaving} | new
    ties = {a: name for chunk in read for a, name in chunk.ties.items() if name in after}
    owner = owners(parts_of(tensors_of(after, None))) if ties else {}
    apart = {alias: name for alias, name in ties.items() if owner.get(alias) != owner[name]}
    copies = {}
    if module:
        copies = {alias: name for alias, name in apart.items() if alias in after}
        _check_copies(version, copies, parts)
    else:
        after |= {alias: after[name] for alias, name in apart.items()}
    return Prepared(
        base,
        version,
        after,
        sum(chunk.changed for chunk in read),
        target if module else tensors,
        parts,
        [one for one in found if one.chunk.code != "removed" and not one.chunk.new],
        _gone={name: one for name, one in tensors.items() if after.get(name) is not one},
        _added={name: one for name, one in after.items() if tensors.get(name) is not one},
        _ties={alias: name for alias, name in ties.items() if alias in after},
        _copies=copies,
    )


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
