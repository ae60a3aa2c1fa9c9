"""Weights in, chunks out."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from sparcel import _cpu
from sparcel.core._checks import checked_whole
from sparcel.core._threads import in_order
from sparcel.errors import checked_name
from sparcel.products.delta.chunk import MOST_ELEMENTS, MOST_NUMBER, MOST_SHARDS, Chunk, Version
from sparcel.products.delta.elements import CHUNK_BYTES, MOST_PIECES, Piece, layout_of, planes_of
from sparcel.products.delta.header import template_of
from sparcel.products.delta.parts import (
    Part,
    Weights,
    held,
    kernel_pieces,
    parts_of,
    sum_of,
    ties_of,
    untied,
)

_ENOUGH = 1 << 16
"""Changes that a header and what models learn cost little beside."""

_MOST_BYTES = 32 << 20
"""Most bytes of weights in a chunk, however few of them change."""

_SAMPLES, _SAMPLE = 16, 1 << 11
"""Places at which elements are sampled, and how many there."""

CODES = {"exponents": (_cpu.MOST_CLASSES, True), "steps": (1, True), "values": (1, False)}
"""How many classes of exponents a code has, and whether it holds steps or new values."""

_MANY = 8
"""If one in so many elements changes, or more, they may change alike."""

_TRIED = 1 << 14
"""Elements whose XOR tells whether that of all is worth while."""


def encode(
    tensors: Weights,
    base: Weights,
    *,
    code: str = "exponents",
    since: Version | None = None,
    target: int | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[bytes]:
    """Yield the chunks that turn ``base`` into ``tensors``.

    Tensors are compared bit by bit: NaN payloads and −0 count. Those that appear, vanish, or change
    their dtype or shape are allowed. Tensors may be on any device, contiguous or not, and DTensors,
    of which each rank encodes its shard. Tied tensors are encoded once. Chunks are made by as many
    threads as torch uses; a chunk waits for the one before it to be taken, so memory is bounded.

    Parameters
    ----------
    tensors
        The new weights: a module, or tensors by name, of any dtype but complex128, quantized ones
        and those of less than a byte.
    base
        The old ones.
    code
        ``exponents``: steps in units in the last place, and places given the exponents of the old
        weights, which are the shortest. ``steps``: the same, but places do not depend on the base.
        ``values``: new values, for receivers that do not know the base. Where it is shorter, all
        elements are sent.
    since
        The version that ``base`` is; by default number 0, whose sum nobody checks.
    target
        The number of the new version; by default the one after ``since``.
    shard
        Where several processes encode a version together: the number of this one, and how many
        there are. Of those that hold the same elements, one encodes them.

    Yields
    ------
    bytes
        A chunk, of at most 4096 pieces of tensors, and of 4 MiB of weights, or of 32 MiB if few of
        these change. There is at least one, even if nothing changes.

    Raises
    ------
    InputError
        If tensors cannot be read as their bits, or a number is out of range.
    """
    checked_name(code, CODES, "code")
    since = since or Version(0, 0)
    checked_whole(since.number, "since.number", 0, MOST_NUMBER)
    checked_whole(since.sum, "since.sum", 0, (1 << 64) - 1)
    target = checked_whole(since.number + 1 if target is None else target, "target", 0, MOST_NUMBER)
    checked_whole(shard[1], "shard[1]", 1, MOST_SHARDS)
    checked_whole(shard[0], "shard[0]", 0, shard[1] - 1)
    yield from encode_parts(parts_of(tensors), parts_of(base), code, since, target, shard)


def encode_parts(
    now: Mapping[str, Part],
    old: Mapping[str, Part],
    code: str,
    since: Version,
    target: int,
    shard: tuple[int, int] = (0, 1),
    apart: bool = False,
) -> Iterator[bytes]:
    """Yield the chunks that turn the parts ``old`` into ``now``: see `encode`.

    If they are to be ``apart``, each is of one tensor.
    """
    ties = ties_of(now)
    no_more = tuple(name for name in ties_of(old) if name not in ties)
    blank = Chunk(since, target, "removed", layout_of(torch.uint8), (), 0, *shard)
    waiting, number = blank, 0
    for chunk in in_order(lambda job: job(), _jobs(untied(now), untied(old), code, blank, apart)):
        if chunk is None:
            continue
        if number:
            yield waiting.to_bytes()
        waiting = replace(chunk, part=number)
        number += 1
    if apart and number:  # what all readers need is in a chunk of its own
        yield waiting.to_bytes()
        waiting = replace(blank, part=number)
    yield replace(waiting, last=True, ties=ties, untied=no_more).to_bytes()


def _jobs(
    now: Mapping[str, Part], old: Mapping[str, Part], code: str, blank: Chunk, apart: bool
) -> Iterator[Callable[[], Chunk | None]]:
    """Yield a job for each chunk."""
    kept = {name for name, part in now.items() if name in old and part.piece == old[name].piece}
    gone = [part.piece for name, part in old.items() if name not in kept]
    there = (one for one in gone if one.count or not one.size)
    for pieces in _filled(there, CHUNK_BYTES, apart):
        yield partial(_removed, blank, pieces, old)
    for names in _alike(now[name].piece for name in now if name in kept):
        nbytes = CHUNK_BYTES if apart else _chunk_bytes(names, now, old)
        every = (piece for name in names for piece in now[name].piece.cuts(nbytes))
        for pieces in _filled((piece for piece in every if piece.count), nbytes, apart):
            yield partial(_changed, blank, pieces, now, old, code)
    for names in _alike(now[name].piece for name in now if name not in kept):
        every = (piece for name in names for piece in now[name].piece.cuts(CHUNK_BYTES))
        for pieces in _filled(every, CHUNK_BYTES, apart):
            yield partial(_new, blank, pieces, now)


def _alike(pieces: Iterable[Piece]) -> Iterator[list[str]]:
    """Yield the names of tensors of each dtype; alike ones follow one another."""
    by_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
    for piece in pieces:
        by_dtype[piece.dtype].append(piece.name)
    for names in by_dtype.values():
        yield sorted(names, key=template_of)


def _filled(pieces: Iterable[Piece], nbytes: int, apart: bool) -> Iterator[list[Piece]]:
    """Yield the pieces of each chunk: of one dtype, or of one tensor, until it is full."""
    waiting: list[Piece] = []
    size = 0
    for piece in pieces:
        more = piece.count * piece.dtype.itemsize
        full = size + more > nbytes or len(waiting) == MOST_PIECES
        if waiting and (full or _kind(waiting[0], apart) != _kind(piece, apart)):
            yield waiting
            waiting, size = [], 0
        waiting.append(piece)
        size += more
    if waiting:
        yield waiting


def _kind(piece: Piece, apart: bool) -> object:
    """Return what the pieces of a chunk have in common."""
    return piece.name if apart else piece.dtype


def _chunk_bytes(names: list[str], now: Mapping[str, Part], old: Mapping[str, Part]) -> int:
    """Return how many bytes of tensors of one dtype go into a chunk.

    Few changes pay for few headers and models: as many bytes as have `_ENOUGH` of them, by the
    share in a sample.
    """
    itemsize = now[names[0]].piece.dtype.itemsize
    total = sum(now[name].piece.count for name in names)
    if total * itemsize <= CHUNK_BYTES:
        return CHUNK_BYTES
    differ = looked_at = 0
    ends = list(accumulate(now[name].piece.count for name in names))
    for number in range(_SAMPLES):
        place = number * total // _SAMPLES
        which = bisect_right(ends, place)
        count = now[names[which]].piece.count
        first = place - (ends[which] - count)
        last = min(first + _SAMPLE, count)
        a, b = (side[names[which]].elements(first, last).cpu() for side in (now, old))
        differ += int((a != b).sum())
        looked_at += last - first
    enough = _ENOUGH * looked_at // max(differ, 1) * itemsize
    return min(max(enough, CHUNK_BYTES), _MOST_BYTES, MOST_ELEMENTS * itemsize)


def _changed(
    blank: Chunk, pieces: list[Piece], now: Mapping[str, Part], old: Mapping[str, Part], code: str
) -> Chunk | None:
    """Return the chunk that tells how pieces change, in the shortest way; None if none does."""
    layout = layout_of(pieces[0].dtype)
    classes, steps = CODES[code]
    before, after = kernel_pieces(pieces, old), kernel_pieces(pieces, now)
    changing, nibbles, limits, changes, shift, places, values, bits, total = _cpu.delta_encode(
        before, after, *layout.coded, classes, steps
    )
    if not changing:
        return None
    pieces, before = [pieces[i] for i in changing], [before[i] for i in changing]
    after = [after[i] for i in changing]
    coded = replace(
        blank,
        code="nibbles" if nibbles else "steps" if steps else "values",
        layout=layout,
        pieces=tuple(pieces),
        sum=total,
        limits=tuple(limits),
        changes=tuple(changes),
        nibbles=nibbles,
        shift=shift,
        lengths=(len(places), len(values), len(bits)),
        streams=places + values + bits,
    )
    if steps:
        coded = _xored(coded, before, after)
    if len(coded.streams) < coded.elements * layout.itemsize:
        return coded
    return _dense(blank, pieces, after, total, new=False)


def _xored(coded: Chunk, old: list[_cpu.Piece], now: list[_cpu.Piece]) -> Chunk:
    """Return a chunk with the XOR of all elements, packed, if that is shorter.

    It can be where many change alike. A sample of the longest piece tells whether it may be.
    """
    size = coded.elements * coded.layout.itemsize
    if _MANY * coded.changed < coded.elements or size > CHUNK_BYTES:
        return coded
    both = list(zip(held(old), held(now), strict=True))
    before, after = max(both, key=lambda pair: len(pair[0]))
    tried = planes_of(before[:_TRIED] ^ after[:_TRIED])
    if len(zlib.compress(tried, 1)) * size > len(coded.streams) * len(tried):
        return coded
    packed = zlib.compress(planes_of(torch.cat([a ^ b for a, b in both])))
    if len(packed) >= len(coded.streams):
        return coded
    alike = replace(coded, code="xor", limits=(), changes=(coded.changed,), nibbles=0, shift=0)
    return replace(alike, lengths=(0, 0, len(packed)), streams=packed)


def _dense(
    blank: Chunk, pieces: list[Piece], now: list[_cpu.Piece], total: int, new: bool
) -> Chunk:
    streams = b"".join(bits.numpy().tobytes() for bits in held(now))
    return replace(
        blank,
        code="dense",
        layout=layout_of(pieces[0].dtype),
        pieces=tuple(pieces),
        sum=total,
        new=new,
        lengths=(0, 0, len(streams)),
        streams=streams,
    )


def _new(blank: Chunk, pieces: list[Piece], now: Mapping[str, Part]) -> Chunk:
    """Return the chunk that brings pieces of tensors which are not there."""
    there = kernel_pieces(pieces, now)
    total = _cpu.delta_sum(there, pieces[0].dtype.itemsize)
    return _dense(blank, pieces, there, total, new=True)


def _removed(blank: Chunk, pieces: list[Piece], old: Mapping[str, Part]) -> Chunk:
    """Return the chunk that takes tensors away."""
    total = -sum(sum_of(old[piece.name]) for piece in pieces) % (1 << 64)
    return replace(blank, layout=layout_of(pieces[0].dtype), pieces=tuple(pieces), sum=total)
