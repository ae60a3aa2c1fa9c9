"""What a chunk says of pieces of tensors: that they change, come or go."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.delta.bits import layout_of, planes_of
from sparcel.delta.chunk import Chunk, Version
from sparcel.delta.parts import Part, Weights, parts_of, untied
from sparcel.delta.pieces import CHUNK_BYTES, Piece
from sparcel.delta.threads import in_threads

CODES = {"exponents": (_cpu.MOST_CLASSES, True), "steps": (1, True), "values": (1, False)}
"""How many classes of exponents a code has, and whether it holds steps or new values."""

_MANY = 8
"""If one in so many elements changes, or more, they may change alike."""
_TRIED = 1 << 14
"""Elements whose XOR tells whether that of all is worth while."""


def kernel_piece(piece: Piece, bits: Tensor | None) -> _cpu.Piece:
    """Return a piece as the compiled kernels take it, with its bits on the host, or without any."""
    there = None if bits is None else bits.cpu()
    return (there, piece.count, piece.key, piece.first, piece.row, piece.stride)


def kernel_pieces(pieces: Iterable[Piece], parts: Mapping[str, Part] | None) -> list[_cpu.Piece]:
    """Return pieces as the compiled kernels take them, with the bits that parts hold, if given."""
    if parts is None:
        return [kernel_piece(piece, None) for piece in pieces]
    return [kernel_piece(piece, parts[piece.name].gathered(piece)) for piece in pieces]


def held(pieces: Iterable[_cpu.Piece]) -> list[Tensor]:
    """Return the bits of pieces that have them."""
    return [bits for bits, *_ in pieces if bits is not None]


def changed(
    blank: Chunk,
    pieces: list[Piece],
    now: Mapping[str, Part],
    old: Mapping[str, Part],
    code: str,
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


def new(blank: Chunk, pieces: list[Piece], now: Mapping[str, Part]) -> Chunk:
    """Return the chunk that brings pieces of tensors which are not there."""
    there = kernel_pieces(pieces, now)
    total = _cpu.delta_sum(there, pieces[0].dtype.itemsize)
    return _dense(blank, pieces, there, total, new=True)


def removed(blank: Chunk, pieces: list[Piece], old: Mapping[str, Part]) -> Chunk:
    """Return the chunk that takes tensors away."""
    total = -sum(sum_of(old[piece.name]) for piece in pieces) % (1 << 64)
    return replace(blank, layout=layout_of(pieces[0].dtype), pieces=tuple(pieces), sum=total)


def sum_of(part: Part) -> int:
    """Return the sum (64 bits) of what a part's elements add to that of their version."""
    return sum(sum_of_piece(part, piece) for piece in part.pieces(CHUNK_BYTES)) % (1 << 64)


def sum_of_piece(part: Part, piece: Piece) -> int:
    """Return what a piece of a part adds to the sum of its version."""
    return _cpu.delta_sum([kernel_piece(piece, part.gathered(piece))], piece.dtype.itemsize)


def version_of(tensors: Weights, number: int = 0) -> Version:
    """Return the version that weights are; of DTensors, the sum counts this rank's shards."""
    jobs = [partial(sum_of, part) for part in untied(parts_of(tensors)).values()]
    return Version(number, sum(in_threads(iter(jobs))) % (1 << 64))
