"""What leaves a vector for the owners of its regions, or the own region for all, on a GPU.

Four kernels: thresholds from samples; the sum, and a bit for each coordinate that reaches its
threshold; the places of these in order; and their values in few bits, of which the errors stay.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel import device
from sparcel.kernels.addition import Addition
from sparcel.kernels.gpu import _region
from sparcel.kernels.gpu._bits import magnitude_bits
from sparcel.kernels.gpu._coding import decode_rows, encode_rows, pack, scale_bits
from sparcel.kernels.gpu._compact import load_inside
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.gpu._region import (
    HEADER,
    INFINITE,
    NON_FINITE,
    add_last,
    add_up,
    bits_at,
    coordinates,
    layout,
    length_of,
    tile_of,
)
from sparcel.kernels.phase import Phase

_FEWEST, _MOST = 1024, 8192
_ENTRIES = 2048  # entries that a program rounds at a time
_STOPS = tl.constexpr(256)  # stops of shares that are compared at a time
_SPREAD = tl.constexpr(0x9E3779B1)
_LOW_24 = tl.constexpr(0xFFFFFF)
_SENT, _MAGNITUDE, _TICKET = map(tl.constexpr, range(3))


class _Constants(NamedTuple):
    """What a phase decides, on a device.

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


@lru_cache(maxsize=256)
def _constants(phase: Phase, rank: int, others: bool, place: torch.device) -> _Constants:
    regions, rows, first = phase.regions, [], 0
    for stop, density in phase.shares:
        owned = regions.before(rank, stop)
        last = stop - owned if others else owned
        count = last - first
        taken = min(count, max(_FEWEST, min(count // 64, _MOST)))
        nth = max(1, min(int(density * taken + 0.5), taken))
        rows.append([stop, first, count, taken, nth])
        first = last
    numbers = torch.tensor(rows, dtype=torch.int64).T.flatten().tolist()
    both = device.put([*numbers, *phase.most], place, torch.int64)
    return _Constants(both[: len(numbers)].view(5, -1), both[len(numbers) :])


@triton.jit
def _sum_at(
    memory, gradient, scale, at, size,
    WHOLE: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    total = load_inside(memory, at, size, WHOLE)
    if ADDED:
        addend = load_inside(gradient, at, size, WHOLE).to(tl.float32)
        if SCALED:
            addend = addend * scale
        total = total + addend
    return total


@triton.jit
def _descend(bits, counted, upper, nth, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the next bits, too, of the ``nth`` largest of those whose ``upper`` bits are told.

    And the rank that it has among those that share these bits.
    """
    here = counted & ((bits >> (SHIFT + WIDTH)) == upper)
    counts = tl.histogram((bits >> SHIFT) & ((1 << WIDTH) - 1), 1 << WIDTH, mask=here)
    reaching = tl.cumsum(counts, axis=0, reverse=True)
    place = tl.maximum(tl.sum((reaching >= nth).to(tl.int32), axis=0) - 1, 0)
    larger = tl.sum(tl.where(tl.arange(0, 1 << WIDTH) > place, counts, 0), axis=0)
    return (upper << WIDTH) | place, nth - larger


@triton.jit
def _nth_largest(bits, counted, nth):
    """Return the ``nth`` largest of the magnitudes that are counted."""
    found, nth = _descend(bits, counted, nth * 0, nth, 20, 11)
    found, nth = _descend(bits, counted, found, nth, 10, 10)
    found, _ = _descend(bits, counted, found, nth, 0, 10)
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
        spread = (((number + step * taken) & _LOW_24) * _SPREAD) & 0xFFFFFFFF
        place = first + tl.where(taken == count, number, ((spread >> 8) * count) >> 24)
        block = place >> block_bits
        if OTHERS:  # the rank's own blocks before it
            skipped = (block + (ranks - 1 - rank)) // tl.maximum(ranks - 1, 1)
        else:
            skipped = block * (ranks - 1) + rank
        at = place + (skipped << block_bits)
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
    for first in range(0, shares, _STOPS):
        number = first + tl.arange(0, _STOPS)
        stop = tl.load(stops + number, mask=number < shares - 1, other=0x7FFFFFFF)
        share += tl.sum((stop <= coordinate).to(tl.int32), axis=0)
    return tl.minimum(share, shares - 1)


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
        if WHOLE:
            tl.store(x + at, total)
        else:
            tl.store(x + at, total, mask=at < size)
    bits = magnitude_bits(total)
    if ONE:
        limit = tl.load(thresholds)
    else:
        share = _share_of(stops, shares, coordinates(first, ranks, block_bits, owner))
        last = _share_of(stops, shares, coordinates(first + TILE - 1, ranks, block_bits, owner))
        limit = tl.load(thresholds + share) + tl.zeros([TILE], tl.int32)
        for later in range(share + 1, last + 1):
            reached = at >= tl.load(stops + later - 1)
            limit = tl.where(reached, tl.load(thresholds + later), limit)
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
            _store_bits(marks, (row.to(tl.int64) * chunks * tiles + which), marked, TILE)
    tl.store(counts + program, found)
    tl.store(peaks + program, peak)


@triton.jit
def _words(bits, TILE: tl.constexpr):
    """Return the words (int32) of bits."""
    rows = tl.reshape(bits, [TILE // 32, 32])
    return tl.sum(rows << tl.arange(0, 32)[None, :], axis=1)


@triton.jit
def _store_bits(words, tile, bits, TILE: tl.constexpr):
    tl.store(words + tile * (TILE // 32) + tl.arange(0, TILE // 32), _words(bits, TILE))


@triton.jit(
    do_not_specialize=[
        *("size", "ranks", "block_bits", "before", "row_bytes", "room", "chunks", "tiles"),
    ]
)
def _emit(
    marks, counts, peaks, finite, headers, most, messages, row_bytes, entries, room, facts,
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
    _, places_at, end, bitmap, low_bits, plain = layout(count, length, BITS, GROUP)
    message = messages + row.to(tl.int64) * row_bytes
    if chunk == 0:
        number = tl.arange(0, CHUNKS)
        peak = tl.load(peaks + row * chunks + number, mask=number < chunks, other=0)
        infinite = tl.max(peak, axis=0) >= INFINITE
        if FLAGGED:
            infinite = infinite | (tl.load(finite.to(tl.pointer_type(tl.int8), bitcast=True)) == 0)
        to = message.to(tl.pointer_type(tl.int64), bitcast=True)
        like = headers + 5 * owner
        tl.store(to, tl.load(like) | tl.where(infinite, NON_FINITE, 0))
        tl.store(to + 1, tl.load(like + 1))
        tl.store(to + 2, tl.load(like + 2))
        tl.store(to + 3, count)
        tl.store(to + 4, end)
        tl.atomic_add(facts + _SENT, count, sem="relaxed")
    words = (message + places_at).to(tl.pointer_type(tl.int32), bitcast=True)
    entries += row.to(tl.int64) * room
    for tile in range(tiles):
        which = chunk.to(tl.int64) * tiles + tile
        first = which * TILE
        if first < length:
            place = first + tl.arange(0, TILE)
            marked = bits_at(
                marks + row.to(tl.int64) * chunks * tiles * (TILE // 32), place, length
            )
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
    has_low = kept & (low_bits > 0)
    low = place & ((one.to(tl.int64) << low_bits) - 1)
    start = bitmap + number * low_bits
    content = low << (start & 31)
    word = words + (start >> 5)
    tl.atomic_or(word, content.to(tl.int32), mask=has_low, sem="relaxed")
    rest = (content >> 32).to(tl.int32)
    tl.atomic_or(word + 1, rest, mask=has_low & (rest != 0), sem="relaxed")


@triton.jit
def _round_tile(
    x, message, codes_at, entries, count, group, ranks, block_bits, owner,
    BITS: tl.constexpr, ROWS: tl.constexpr, LOG_GROUP: tl.constexpr,
):  # fmt: skip
    """Round rows of entries; leave the errors in x; return by how much its magnitude fell."""
    GROUP: tl.constexpr = 1 << LOG_GROUP
    row = group + tl.arange(0, ROWS)
    number = (row * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    inside = number < count
    place = tl.load(entries + number, mask=inside, other=0).to(tl.int64)
    at = coordinates(place, ranks, block_bits, owner)
    value = tl.load(x + at, mask=inside, other=0.0)
    size = tl.maximum(tl.minimum(count - row * GROUP, GROUP), 1)
    code, low, high, _ = encode_rows(value, size, 0, BITS, ROWS, LOG_GROUP, False, True)
    rest = value - decode_rows(code, low, high, BITS, BITS == 2)
    tl.store(x + at, rest, mask=inside)
    scales = (message + HEADER).to(tl.pointer_type(tl.int16), bitcast=True)
    used = row * GROUP < count
    if BITS == 2:
        tl.store(scales + 2 * row, scale_bits(low, True).to(tl.int16), mask=used)
        tl.store(scales + 2 * row + 1, scale_bits(high, True).to(tl.int16), mask=used)
    else:
        tl.store(scales + row, scale_bits(low, True).to(tl.int16), mask=used)
    code = tl.where(inside, code, 0)
    BYTES: tl.constexpr = GROUP * BITS // 8
    byte = group * BYTES + tl.arange(0, ROWS * BYTES)
    there = byte < (count * BITS + 7) // 8
    tl.store(message + codes_at + byte, pack(code, BITS, 8).to(tl.uint8), mask=there)
    fell = tl.where(inside, tl.abs(value) - tl.abs(rest), 0.0).to(tl.float64)
    return tl.sum(tl.sum(fell, axis=1), axis=0)


@triton.jit(
    do_not_specialize=[
        *("size", "ranks", "block_bits", "before", "row_bytes", "room", "chunks", "tiles"),
    ]
)
def _round(
    x, entries, room, messages, row_bytes, facts, partials, rose,
    size, ranks, block_bits, before, chunks, tiles,
    NET: tl.constexpr, BITS: tl.constexpr, LOG_GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round the entries of a chunk; the last program writes by how much all fell, less ``rose``."""
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    owner = before + row
    message = messages + row.to(tl.int64) * row_bytes
    count = tl.load(message.to(tl.pointer_type(tl.int64), bitcast=True) + 3)
    length = length_of(size, ranks, block_bits, owner).to(tl.int64)
    codes_at, _, _, _, _, _ = layout(count, length, BITS, 1 << LOG_GROUP)
    fell = tl.zeros([1], tl.float64)
    for tile in range(tiles):
        group = (chunk.to(tl.int64) * tiles + tile) * ROWS
        if (group << LOG_GROUP) < count:
            fell += _round_tile(
                x, message, codes_at, entries + row.to(tl.int64) * room, count, group, ranks,
                block_bits, owner, BITS, ROWS, LOG_GROUP,
            )  # fmt: skip
    total, last = add_last(tl.sum(fell, axis=0), partials, facts + _TICKET)
    if last:
        if NET:
            total -= tl.load(rose)
        tl.store(facts.to(tl.pointer_type(tl.float64), bitcast=True) + _MAGNITUDE, total)


class Left(NamedTuple):
    """What has left a vector: messages ``[rows, bytes]``, their entries, and their magnitude."""

    messages: Tensor
    sent: Tensor
    magnitude: Tensor


class _Source(NamedTuple):
    """What is selected from: ``memory + scale·gradient``, which x becomes, or x itself."""

    memory: Tensor
    gradient: Tensor
    scale: float
    x: Tensor
    added: bool


def _take(
    source: _Source,
    phase: Phase,
    rank: int,
    step: int,
    others: bool,
    finite: Tensor | None = None,
    rose: Tensor | None = None,
) -> Left:
    """Take what is selected of all other regions out of x, or what is of the own one."""
    regions, x = phase.regions, source.x
    rows, before, own = (regions.ranks, 0, rank) if others else (1, rank, -1)
    where = {"size": regions.size, "ranks": regions.ranks, "block_bits": _region.block_bits(phase)}
    sums = {"ADDED": source.added, "SCALED": source.scale != 1}
    table, most = _constants(phase, rank, others, x.device)
    chunks, tiles = _region.grid_of(regions.length(0))  # the longest
    row_bytes = _region.row_bytes(phase)
    messages = x.new_empty((rows, row_bytes), dtype=torch.uint8)
    facts = x.new_empty(4, dtype=torch.int64)
    shares = len(phase.shares)
    thresholds = x.new_empty(shares, dtype=torch.int32)
    words, tile = messages.numel() // 4, _region.TILE
    launch(
        _begin, shares + triton.cdiv(words, tile), source.memory, source.gradient, source.scale,
        **where, rank=rank, table=table, shares=shares, step=step & 0xFFFFFF,
        thresholds=thresholds, messages=messages, words=words, facts=facts,
        **sums, OTHERS=others, SAMPLES=_MOST, TILE=tile, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    marks = x.new_empty(rows * chunks * tiles * (tile // 32), dtype=torch.int32)
    counted = x.new_empty((2, rows * chunks), dtype=torch.int32)
    counts, peaks = counted.unbind()
    common: dict[str, Any] = {**where, "before": before}
    divided = {"chunks": chunks, "tiles": tiles}
    launch(
        _mark, rows * chunks, source.memory, source.gradient, source.scale, x, **common, own=own,
        stops=table, shares=shares, thresholds=thresholds, marks=marks, counts=counts, peaks=peaks,
        **divided, **sums, ONE=shares == 1, TILE=tile, enable_fp_fusion=False,
    )  # fmt: skip
    room = max(phase.most) if others else phase.most[rank]
    entries = x.new_empty(rows * room, dtype=torch.int32)
    launch(
        _emit, rows * chunks, marks, counts, peaks, facts if finite is None else finite,
        _region.headers_of(phase, x.device), most, messages, row_bytes, entries, room, facts,
        **common, **divided, FLAGGED=finite is not None, BITS=phase.bits, GROUP=phase.group,
        TILE=tile, CHUNKS=_region.CHUNKS,
    )  # fmt: skip
    chunks, tiles = _region.grid_of(room, _ENTRIES)
    programs = rows * chunks
    launch(
        _round, programs, x, entries, room, messages, row_bytes, facts,
        x.new_empty(programs, dtype=torch.float64), facts if rose is None else rose,
        **common, chunks=chunks, tiles=tiles, NET=rose is not None,
        BITS=phase.bits, LOG_GROUP=phase.group.bit_length() - 1, ROWS=_ENTRIES // phase.group,
        enable_fp_fusion=False,
    )  # fmt: skip
    return Left(messages, facts[_SENT.value], facts.view(torch.float64)[_MAGNITUDE.value])


def enter(addition: Addition, up: Phase, rank: int, step: int) -> Left:
    """Compute x = memory + addend, and take out of it what is selected of the others' regions."""
    gradient = addition.gradient.detach()
    source = _Source(addition.memory, gradient, addition.scale, addition.scratch, True)
    return _take(source, up, rank, step, True)


def take_own(
    x: Tensor, down: Phase, rank: int, step: int, finite: Tensor, rose: Tensor
) -> tuple[Tensor, Tensor]:
    """Take what is selected out of the own region; return the message, and by how much x fell.

    Parameters
    ----------
    finite
        bool ``[]``: whether all that was added to the region was finite, and sound.
    rose
        float64 ``[]``: by how much the region's magnitude rose before, which is subtracted.
    """
    left = _take(_Source(x, x, 1.0, x, False), down, rank, step, False, finite, rose)
    return left.messages[0], left.magnitude
