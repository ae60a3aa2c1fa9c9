"""Weights in, chunks out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from sparcel import _cpu
from sparcel._checks import checked_whole
from sparcel.delta.bits import layout_of
from sparcel.delta.chunk import MOST_NUMBER, MOST_SHARDS, Chunk, Version
from sparcel.delta.parts import Part, Weights, parts_of, ties_of, untied
from sparcel.delta.pieces import CHUNK_BYTES, MOST_PIECES, Piece
from sparcel.errors import checked_name

T = TypeVar("T")

CODES = {"exponents": (_cpu.MOST_CLASSES, True), "steps": (1, True), "values": (1, False)}
"""How many classes of exponents a code has, and whether it holds steps or new values."""


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
        A chunk, of at most 4 MiB of weights and 4096 pieces of tensors. There is at least one, even
        if nothing changes.

    Raises
    ------
    InputError
        If tensors cannot be read as their bits, or a number is out of range.
    """
    checked_name(code, CODES, "code")
    since = since or Version(0, 0)
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
) -> Iterator[bytes]:
    """Yield the chunks that turn the parts ``old`` into ``now``: see `encode`."""
    ties = ties_of(now)
    no_more = tuple(name for name in ties_of(old) if name not in ties)
    blank = Chunk(since, target, "removed", layout_of(torch.uint8), (), 0, *shard)
    waiting, number = blank, 0
    for chunk in in_threads(_jobs(untied(now), untied(old), code, blank)):
        if chunk is None:
            continue
        if number:
            yield waiting.to_bytes()
        waiting = replace(chunk, part=number)
        number += 1
    yield replace(waiting, last=True, ties=ties, untied=no_more).to_bytes()


def _jobs(
    now: Mapping[str, Part], old: Mapping[str, Part], code: str, blank: Chunk
) -> Iterator[Callable[[], Chunk | None]]:
    """Yield a job for each chunk; a chunk takes tensors of one dtype until it is full."""
    kept = {name for name, part in now.items() if name in old and part.piece == old[name].piece}
    for name, part in old.items():
        if name not in kept and (part.piece.count or not part.piece.size):
            yield partial(_removed, blank, part)
    waiting: list[Piece] = []
    size = 0
    for piece in (piece for name in now if name in kept for piece in now[name].pieces()):
        nbytes = piece.count * piece.dtype.itemsize
        full = size + nbytes > CHUNK_BYTES or len(waiting) == MOST_PIECES
        if waiting and (full or waiting[0].dtype != piece.dtype):
            yield partial(_changed, blank, waiting, now, old, code)
            waiting, size = [], 0
        if piece.count:
            waiting.append(piece)
            size += nbytes
    if waiting:
        yield partial(_changed, blank, waiting, now, old, code)
    for name, part in now.items():
        if name not in kept:
            for piece in part.pieces():
                yield partial(_new, blank, part, piece)


def kernel_piece(piece: Piece, bits: Tensor | None) -> _cpu.Piece:
    """Return a piece as the compiled kernels take it, with its bits on the host, or without any."""
    there = None if bits is None else bits.cpu()
    return (there, piece.count, piece.key, piece.first, piece.row, piece.stride)


def kernel_pieces(pieces: Iterable[Piece], parts: Mapping[str, Part] | None) -> list[_cpu.Piece]:
    """Return pieces as the compiled kernels take them, with the bits that parts hold, if given."""
    if parts is None:
        return [kernel_piece(piece, None) for piece in pieces]
    return [kernel_piece(piece, parts[piece.name].gathered(piece)) for piece in pieces]


def _changed(
    blank: Chunk,
    pieces: list[Piece],
    now: Mapping[str, Part],
    old: Mapping[str, Part],
    code: str,
) -> Chunk | None:
    layout = layout_of(pieces[0].dtype)
    classes, steps = CODES[code]
    after = kernel_pieces(pieces, now)
    limits, changes, places, values, bits, total = _cpu.delta_encode(
        kernel_pieces(pieces, old), after, *layout.coded, classes, steps
    )
    if not any(changes):
        return None
    streams = places + values + bits
    if len(streams) >= sum(piece.count for piece in pieces) * layout.itemsize:
        return _dense(blank, pieces, after, total, new=False)
    return replace(
        blank,
        code="steps" if steps else "values",
        layout=layout,
        pieces=tuple(pieces),
        sum=total,
        limits=tuple(limits),
        changes=tuple(changes),
        lengths=(len(places), len(values)),
        streams=streams,
    )


def _dense(
    blank: Chunk, pieces: list[Piece], now: list[_cpu.Piece], total: int, new: bool
) -> Chunk:
    return replace(
        blank,
        code="dense",
        layout=layout_of(pieces[0].dtype),
        pieces=tuple(pieces),
        sum=total,
        new=new,
        streams=b"".join(bits.numpy().tobytes() for bits, *_ in now if bits is not None),
    )


def _new(blank: Chunk, part: Part, piece: Piece) -> Chunk:
    there = [kernel_piece(piece, part.gathered(piece))]
    return _dense(blank, [piece], there, _cpu.delta_sum(there, piece.dtype.itemsize), new=True)


def _removed(blank: Chunk, part: Part) -> Chunk:
    layout, total = layout_of(part.piece.dtype), -sum_of(part) % (1 << 64)
    return replace(blank, layout=layout, pieces=(part.piece,), sum=total)


def sum_of(part: Part) -> int:
    """Return the sum (64 bits) of what a part's elements add to that of their version."""
    total = 0
    for piece in part.pieces():
        total += _cpu.delta_sum([kernel_piece(piece, part.gathered(piece))], piece.dtype.itemsize)
    return total % (1 << 64)


def version_of(tensors: Weights, number: int = 0) -> Version:
    """Return the version that weights are; of DTensors, the sum counts this rank's shards."""
    jobs = [partial(sum_of, part) for part in untied(parts_of(tensors)).values()]
    return Version(number, sum(in_threads(iter(jobs))) % (1 << 64))


def in_threads(jobs: Iterator[Callable[[], T]]) -> Iterator[T]:
    """Run jobs in as many threads as torch uses, and yield their results in order."""
    threads = torch.get_num_threads()
    yield from in_pool(jobs, threads) if threads > 1 else (job() for job in jobs)


def in_pool(jobs: Iterator[Callable[[], T]], threads: int) -> Iterator[T]:
    """Run jobs in other threads than the one that calls, and yield their results in order.

    On a GPU they are in the stream of the one that calls. All that have begun are awaited, unless
    a second interrupt comes.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(job: Callable[[], T]) -> T:
        with torch.cuda.stream(stream):
            return job()

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[T]] = deque()
        for job in jobs:
            waiting.append(pool.submit(run, job))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
