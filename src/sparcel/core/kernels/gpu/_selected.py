"""What leaves a vector for the owners of its regions, or the own region for all, on a GPU.

Four kernels: thresholds from samples; the sum, and a bit for each coordinate that reaches its
threshold; the places of these, in order; and their values in few bits, of which the errors stay.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core import device
from sparcel.core.kernels.definitions.regions import MOST_SAMPLE, Entered, sample_rank, sample_size
from sparcel.core.kernels.definitions.select import Addition
from sparcel.core.kernels.gpu import _message
from sparcel.core.kernels.gpu._base import (
    is_infinite,
    launch,
    load_inside,
    magnitude_bits,
    store_inside,
)
from sparcel.core.kernels.gpu._message import (
    TILE,
    WARPS,
    add_last,
    add_up,
    bits_at,
    grid_of,
    header_of,
    kind_of,
    layout_of,
    length_of,
    non_finite,
    pair,
    parts_of,
    skipped,
    tile_of,
    write_rows,
)
from sparcel.core.kernels.gpu._radix import next_bits
from sparcel.core.kernels.regions import Leg, row_bytes


class _Source(NamedTuple):
    """What is selected from: x = memory + scale·gradient, or x itself."""

    memory: Tensor
    gradient: Tensor
    scale: float
    x: Tensor
    added: bool

    def flags(self) -> dict[str, bool]:
        """Return what kernels are compiled for."""
        return {"ADDED": self.added, "SCALED": self.scale != 1}


class _Limits(NamedTuple):
    """What decides how much leaves.

    Attributes
    ----------
    shares
        int64 ``[5, shares]``: where a share stops, its first place in the domain that is selected
        from, its places, how many of these are in a sample, and the rank of the threshold in it.
    most
        int64 ``[ranks]``: the most entries of a region's message.
    """

    shares: Tensor
    most: Tensor


def _limits_of(leg: Leg, rank: int, others: bool, place: torch.device) -> _Limits:
    """Return what a leg decides of the others' regions, or of the own one, on a device."""
    stream = torch.cuda.current_stream(place).cuda_stream if place.type == "cuda" else 0
    return _limits_on(leg, rank, others, place, stream)


@lru_cache(maxsize=256)
def _limits_on(leg: Leg, rank: int, others: bool, place: torch.device, _: int) -> _Limits:
    """Each stream has its own: nothing else would wait until they are there."""
    rows = []
    for stop, density, first, last in leg.regions.parts(leg.shares, rank, others):
        taken = sample_size(last - first)
        rows.append((stop, first, last - first, taken, sample_rank(taken, density)))
    numbers = [number for column in zip(*rows, strict=True) for number in column]
    both = device.put([*numbers, *leg.most], place, torch.int64)
    return _Limits(both[: len(numbers)].view(5, -1), both[len(numbers) :])


@triton.jit
def _sum_at(
    memory, gradient, scale, at, size,
    WHOLE: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Return memory + scale·gradient at coordinates, or memory alone; 0 from ``size`` on."""
    total = load_inside(memory, at, size, WHOLE)
    if ADDED:
        addend = load_inside(gradient, at, size, WHOLE).to(tl.float32)
        if SCALED:
            addend = addend * scale
        total = total + addend
    return total


@triton.jit
def _nth_largest(bits, counted, nth):
    """Return the ``nth`` largest of the magnitudes that are counted."""
    found, nth = next_bits(bits, counted, nth * 0, nth, 20, 11)
    found, nth = next_bits(bits, counted, found, nth, 10, 10)
    found, _ = next_bits(bits, counted, found, nth, 0, 10)
    return found


@triton.jit(do_not_specialize=["size", "ranks", "block_bits", "rank", "shares", "step", "words"])
def _begin(
    memory, gradient, scale, size, ranks, block_bits, rank, table, shares, step, thresholds,
    messages, words, facts,
    ADDED: tl.constexpr, SCALED: tl.constexpr, OTHERS: tl.constexpr,
    SAMPLES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the threshold of a share in its sample, or write zeros to a part of the messages."""
    program = tl.program_id(0)
    if program < shares:
        first = tl.load(table + shares + program)
        count = tl.load(table + 2 * shares + program)
        taken = tl.load(table + 3 * shares + program)
        number = tl.arange(0, SAMPLES).to(tl.int64)
        spread = (((number + step * taken) & 0xFFFFFF) * 0x9E3779B1) & 0xFFFFFFFF
        place = first + tl.where(taken == count, number, ((spread >> 8) * count) >> 24)
        if OTHERS:  # the rank's own blocks before it
            blocks = ((place >> block_bits) + (ranks - 1 - rank)) // tl.maximum(ranks - 1, 1)
            at = place + (blocks << block_bits)
        else:
            at = place + skipped(place, ranks, block_bits, rank)
        counted = number < taken
        end = tl.where(counted, size, 0)
        bits = magnitude_bits(_sum_at(memory, gradient, scale, at, end, False, ADDED, SCALED))
        nth = tl.load(table + 4 * shares + program).to(tl.int32)
        tl.store(thresholds + program, tl.maximum(_nth_largest(bits, counted, nth), 1))
    else:
        part = (program - shares).to(tl.int64)
        word = part * TILE + tl.arange(0, TILE)
        zero = tl.zeros([TILE], tl.int32)
        tl.store(messages.to(tl.pointer_type(tl.int32), bitcast=True) + word, zero, word < words)
        if part == 0:
            tl.store(facts + tl.arange(0, 4), tl.zeros([4], tl.int64))


@triton.jit
def _share_of(stops, shares, coordinate):
    """Return the share of a coordinate; the last one past the end."""
    share = shares * 0
    for first in range(0, shares, 256):
        number = first + tl.arange(0, 256)
        stop = tl.load(stops + number, mask=number < shares - 1, other=0x7FFFFFFF)
        share += tl.sum((stop <= coordinate).to(tl.int32), axis=0)
    return tl.minimum(share, shares - 1)


@triton.jit
def _limits_at(
    at, first, stops, shares, thresholds, ranks, block_bits, owner,
    ONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the thresholds of the coordinates of a tile; ``ONE`` if there is only one share."""
    if ONE:
        limit = tl.load(thresholds)
    else:
        end = first + TILE - 1
        share = _share_of(stops, shares, first + skipped(first, ranks, block_bits, owner))
        last = _share_of(stops, shares, end + skipped(end, ranks, block_bits, owner))
        limit = tl.load(thresholds + share) + tl.zeros([TILE], tl.int32)
        for later in range(share + 1, last + 1):
            reached = at >= tl.load(stops + later - 1)
            limit = tl.where(reached, tl.load(thresholds + later), limit)
    return limit


def _thresholds(
    source: _Source,
    leg: Leg,
    limits: _Limits,
    rank: int,
    step: int,
    others: bool,
    messages: Tensor,
    facts: Tensor,
) -> Tensor:
    """Return the threshold of each share, bits in int32; set messages and facts to zero."""
    shares, words = len(leg.shares), messages.numel() // 4
    thresholds = source.x.new_empty(shares, dtype=torch.int32)
    launch(
        _begin, shares + triton.cdiv(words, TILE), source.memory, source.gradient, source.scale,
        *layout_of(leg), rank, limits.shares, shares, step & 0xFFFFFF, thresholds, messages,
        words, facts, **source.flags(), OTHERS=others, SAMPLES=MOST_SAMPLE, TILE=TILE, num_warps=16,
        enable_fp_fusion=False,
    )  # fmt: skip
    return thresholds


_ENTRIES = 2048  # entries that a program rounds at a time


@triton.jit
def _mark_tile(
    memory, gradient, scale, x, size, ranks, block_bits, owner, first, stops, shares, thresholds,
    WHOLE: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, ONE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add a tile; return which of it reach their thresholds, and the largest magnitude."""
    _, at = tile_of(first, ranks, block_bits, owner, TILE)
    total = _sum_at(memory, gradient, scale, at, size, WHOLE, ADDED, SCALED)
    if ADDED:
        store_inside(x, at, total, size, WHOLE)
    bits = magnitude_bits(total)
    limit = _limits_at(at, first, stops, shares, thresholds, ranks, block_bits, owner, ONE, TILE)
    return (bits >= limit).to(tl.int32), tl.max(bits, axis=0)


@triton.jit(
    do_not_specialize=["size", "ranks", "block_bits", "before", "own", "shares", "chunks", "tiles"]
)
def _mark(
    memory, gradient, scale, x, size, ranks, block_bits, before, own, stops, shares, thresholds,
    marks, counts, peaks, chunks, tiles,
    ADDED: tl.constexpr, SCALED: tl.constexpr, ONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Mark a bit for each coordinate of a chunk that reaches its threshold, and count them.

    ``before`` regions have no row; nothing leaves the region ``own``.
    """
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    owner = before + row
    length = length_of(size, ranks, block_bits, owner)
    found, peak = 0, 0
    for tile in range(tiles):
        which = chunk.to(tl.int64) * tiles + tile
        first = which * TILE
        if first < length:
            if first + TILE <= length:
                marked, largest = _mark_tile(
                    memory, gradient, scale, x, size, ranks, block_bits, owner, first, stops,
                    shares, thresholds, True, ADDED, SCALED, ONE, TILE,
                )  # fmt: skip
            else:
                marked, largest = _mark_tile(
                    memory, gradient, scale, x, size, ranks, block_bits, owner, first, stops,
                    shares, thresholds, False, ADDED, SCALED, ONE, TILE,
                )  # fmt: skip
            marked = tl.where(owner == own, 0, marked)
            found += tl.sum(marked, axis=0)
            peak = tl.maximum(peak, largest)
            word = (row.to(tl.int64) * chunks * tiles + which) * (TILE // 32)
            tl.store(marks + word + tl.arange(0, TILE // 32), _words(marked, TILE))
    tl.store(counts + program, found)
    tl.store(peaks + program, peak)


@triton.jit
def _words(bits, TILE: tl.constexpr):
    """Return the words (int32) of bits."""
    rows = tl.reshape(bits, [TILE // 32, 32])
    return tl.sum(rows << tl.arange(0, 32)[None, :], axis=1)


@triton.jit(
    do_not_specialize=[
        *("size", "ranks", "block_bits", "before", "row_bytes", "room", "chunks", "tiles"),
        *("begins", "detail"),
    ]
)
def _emit(
    marks, counts, peaks, finite, most, messages, row_bytes, entries, room, facts, begins, detail,
    size, ranks, block_bits, before, chunks, tiles,
    FLAGGED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write the places that are marked, one after another and packed, and the header."""
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    owner = before + row
    length = length_of(size, ranks, block_bits, owner).to(tl.int64)
    start, total = add_up(counts + row * chunks, chunk, chunks, CHUNKS)
    count = tl.minimum(total, tl.load(most + owner))
    _, places_at, end, bitmap, low_bits, plain = parts_of(count, length, BITS, GROUP)
    message = messages + row.to(tl.int64) * row_bytes
    if chunk == 0:
        number = tl.arange(0, CHUNKS)
        peak = tl.load(peaks + row * chunks + number, mask=number < chunks, other=0)
        infinite = is_infinite(tl.max(peak, axis=0))
        if FLAGGED:
            infinite = infinite | (tl.load(finite.to(tl.pointer_type(tl.int8), bitcast=True)) == 0)
        to = message.to(tl.pointer_type(tl.int64), bitcast=True)
        lane = tl.arange(0, 8)
        header = header_of(lane, begins | non_finite(infinite), detail, length, count, end)
        tl.store(to + lane, header, mask=lane < 5)
        tl.atomic_add(facts, count, sem="relaxed")
    words = (message + places_at).to(tl.pointer_type(tl.int32), bitcast=True)
    entries += row.to(tl.int64) * room
    marks += row.to(tl.int64) * chunks * tiles * (TILE // 32)
    for tile in range(tiles):
        first = (chunk.to(tl.int64) * tiles + tile) * TILE
        if first < length:
            place = first + tl.arange(0, TILE)
            marked = bits_at(marks, place, length)
            number = start + tl.cumsum(marked, axis=0) - marked
            start += tl.sum(marked, axis=0)
            kept = (marked != 0) & (number < count)
            tl.store(entries + number, place.to(tl.int32), mask=kept)
            if plain:
                word = (first >> 5) + tl.arange(0, TILE // 32)
                there = word * 32 < length
                tl.store(words + word, _words(kept.to(tl.int32), TILE), mask=there)
            else:
                _pack(words, place, number.to(tl.int64), bitmap, low_bits, kept)


@triton.jit
def _pack(words, place, number, bitmap, low_bits, kept):
    """Set the bits of places, in any order: that of an OR does not matter."""
    one = tl.zeros_like(number).to(tl.int32) + 1
    bit = (place >> low_bits) + number
    tl.atomic_or(words + (bit >> 5), one << (bit & 31).to(tl.int32), mask=kept, sem="relaxed")
    low = place & ((one.to(tl.int64) << low_bits) - 1)
    start = bitmap + number * low_bits
    content = low << (start & 31)
    word = words + (start >> 5)
    tl.atomic_or(word, content.to(tl.int32), mask=kept, sem="relaxed")
    rest = (content >> 32).to(tl.int32)
    tl.atomic_or(word + 1, rest, mask=kept & (rest != 0), sem="relaxed")


@triton.jit
def _round_tile(
    x, message, entries, count, group, ranks, block_bits, owner,
    BITS: tl.constexpr, ROWS: tl.constexpr, LOG_GROUP: tl.constexpr,
):  # fmt: skip
    """Round rows of entries; leave the errors in x; return by how much its magnitude fell."""
    GROUP: tl.constexpr = 1 << LOG_GROUP
    row = group + tl.arange(0, ROWS)
    number = (row * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    inside = number < count
    place = tl.load(entries + number, mask=inside, other=0).to(tl.int64)
    at = place + skipped(place, ranks, block_bits, owner)
    value = tl.load(x + at, mask=inside, other=0.0)
    rest, _ = write_rows(value, message, group, count, BITS, ROWS, LOG_GROUP)
    tl.store(x + at, rest, mask=inside)
    fell = tl.where(inside, tl.abs(value) - tl.abs(rest), 0.0).to(tl.float64)
    return tl.sum(tl.sum(fell, axis=1), axis=0)


@triton.jit(
    do_not_specialize=["ranks", "block_bits", "before", "row_bytes", "room", "chunks", "tiles"]
)
def _round(
    x, entries, room, messages, row_bytes, facts, partials, fell,
    ranks, block_bits, before, chunks, tiles,
    BITS: tl.constexpr, LOG_GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round the entries of a chunk; the last program adds up by how much all ``fell``."""
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    owner = before + row
    message = messages + row.to(tl.int64) * row_bytes
    count = tl.load(message.to(tl.pointer_type(tl.int64), bitcast=True) + 3)
    errors = tl.zeros([1], tl.float64)
    for tile in range(tiles):
        group = (chunk.to(tl.int64) * tiles + tile) * ROWS
        if (group << LOG_GROUP) < count:
            errors += _round_tile(
                x, message, entries + row.to(tl.int64) * room, count, group, ranks,
                block_bits, owner, BITS, ROWS, LOG_GROUP,
            )  # fmt: skip
    add_last(tl.sum(errors, axis=0), partials, facts + 2, fell)


def _take(
    source: _Source,
    leg: Leg,
    rank: int,
    step: int,
    others: bool,
    finite: Tensor | None = None,
    fell: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take what is selected of all other regions out of x, or what is of the own one.

    Return messages by owner (uint8 ``[rows, bytes]``), how many entries are in them (int64 ``[]``),
    and by how much the sum of magnitudes fell (float64 ``[]``), added to what it ``fell`` before.
    """
    x, layout, regions = source.x, layout_of(leg), leg.regions
    rows, first, own = (regions.ranks, 0, rank) if others else (1, rank, -1)
    room = max(leg.most) if others else leg.most[rank]
    limits, stride = _limits_of(leg, rank, others, x.device), row_bytes(leg.bounds)
    messages = x.new_empty((rows, stride), dtype=torch.uint8)
    facts = x.new_empty(4, dtype=torch.int64)  # how many are sent, by how much x fell, a ticket
    fell = facts.view(torch.float64)[1] if fell is None else fell
    thresholds = _thresholds(source, leg, limits, rank, step, others, messages, facts)

    grid, tile, shares = grid_of(regions.length(0)), _message.TILE, len(leg.shares)
    programs = rows * grid.chunks
    marks = x.new_empty(programs * grid.tiles * tile // 32, dtype=torch.int32)
    counts, peaks = pair(x, programs)
    launch(
        _mark, programs, source.memory, source.gradient, source.scale, x, *layout, first, own,
        limits.shares, shares, thresholds, marks, counts, peaks, *grid,
        ONE=shares == 1, TILE=tile, **source.flags(), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    entries = x.new_empty(rows * room, dtype=torch.int32)
    launch(
        _emit, programs, marks, counts, peaks, facts if finite is None else finite, limits.most,
        messages, stride, entries, room, facts, *kind_of(leg), *layout, first, *grid,
        FLAGGED=finite is not None, BITS=leg.bits, GROUP=leg.group, TILE=tile,
        CHUNKS=_message.CHUNKS, num_warps=WARPS,
    )  # fmt: skip
    grid = grid_of(room, _ENTRIES)
    programs = rows * grid.chunks
    launch(
        _round, programs, x, entries, room, messages, stride, facts,
        x.new_empty(programs, dtype=torch.float64), fell, *layout[1:], first, *grid,
        BITS=leg.bits, LOG_GROUP=leg.group.bit_length() - 1,
        ROWS=_ENTRIES // leg.group, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return messages, facts[0], fell


def enter(addition: Addition, up: Leg, rank: int, step: int) -> Entered:
    """Compute x = memory + addend, and take out of it what is selected of the others' regions."""
    gradient = addition.gradient.detach()
    source = _Source(addition.memory, gradient, float(addition.scale), addition.scratch, True)
    return Entered(*_take(source, up, rank, step, True))


def take_own(
    x: Tensor, down: Leg, rank: int, step: int, finite: Tensor, fell: Tensor
) -> tuple[Tensor, Tensor]:
    """Take what is selected out of the own region; return the message, and by how much x fell.

    ``finite``, a bool ``[]``, is whether all that was added to the region is finite, and sound. The
    region's magnitude ``fell`` by so much before (float64 ``[]``), to which this is added.
    """
    source = _Source(x, x, 1.0, x, False)
    messages, _, fell = _take(source, down, rank, step, False, finite, fell)
    return messages[0], fell
