"""Reads messages of selected coordinates, on a GPU: what others sent, and what owners returned.

Three kernels. The first checks the headers and counts the bits of bitmaps; the second turns packed
indices into bitmaps of all coordinates, and finds what is wrong with them; the third reads the
values. A message that is not sound sets a flag, and whatever it holds, no kernel leaves its memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core.kernels.definitions.regions import Delivered
from sparcel.core.kernels.gpu import _message
from sparcel.core.kernels.gpu._base import launch
from sparcel.core.kernels.gpu._message import (
    WARPS,
    add_last,
    add_up,
    bits_at,
    codes_span,
    grid_of,
    header_of,
    is_plain,
    kind_of,
    layout_of,
    length_of,
    non_finite,
    pair,
    parts_of,
    tile_of,
    values_at,
)
from sparcel.core.kernels.regions import Leg

_FACTS = 8
"""Numbers before the counts of messages, int64: how many entries there are, by how much the sum of
magnitudes fell (float64), a ticket, and two flags. Behind the counts are the parts of that sum.
"""


@triton.jit
def _finite_at(facts):
    """Return where 1 is as long as all is finite."""
    return facts + 3


@triton.jit
def _fault_at(facts):
    """Return where 1 is if a message is bad."""
    return facts + 4


@triton.jit
def _count_at(facts, row):
    """Return where the count of a message is, or -1 if it is none that is read."""
    return facts + 8 + row


@triton.jit
def _add_fell(fell, facts, ranks):
    """Add by how much magnitudes fell in this program."""
    add_last(fell, _count_at(facts, ranks), facts + 2, facts + 1)


@triton.jit
def _count_in(message, row_bytes, begins, detail, length, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return the count of a message, -1 if its header is not one of such a region."""
    lane = tl.arange(0, 8)
    words = message.to(tl.pointer_type(tl.int64), bitcast=True)
    # What cannot be a count differs from the next that can be one.
    count = tl.minimum(tl.maximum(tl.load(words + 3), 0), length)
    _, _, end, _, _, _ = parts_of(count, length, BITS, GROUP)
    expected = header_of(lane, begins, detail, length, count, end)
    differing = (tl.load(words + lane, mask=lane < 5, other=0) ^ expected) & ~non_finite(lane == 0)
    wrong = tl.max(((differing != 0) & (lane < 5)).to(tl.int32), axis=0)
    return tl.where((wrong == 0) & (end <= row_bytes), count, -1)


@triton.jit(
    do_not_specialize=[
        *("size", "ranks", "block_bits", "fixed", "own", "row_bytes", "chunks", "tiles"),
        *("begins", "detail"),
    ]
)
def _count(
    messages, row_bytes, facts, masks, counts, placed, begins, detail,
    fixed, own, size, ranks, block_bits, chunks, tiles,
    BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Check a header, write its count, and count the bits of a chunk of its bitmap.

    Row r is about region r, or all are about the region ``fixed`` unless that is negative.
    """
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    region = tl.where(fixed < 0, row, fixed)
    length = length_of(size, ranks, block_bits, region).to(tl.int64)
    message = messages + row.to(tl.int64) * row_bytes
    count = _count_in(message, row_bytes, begins, detail, length, BITS, GROUP)
    count = tl.where(row == own, -1, count)
    _, places_at, _, bitmap, _, plain = parts_of(tl.maximum(count, 0), length, BITS, GROUP)
    if chunk == 0:
        # After a bitmap of all coordinates, zeros fill the last word.
        last = (message + places_at).to(tl.pointer_type(tl.int64), bitcast=True) + (bitmap >> 6)
        filled = plain & ((bitmap & 63) > 0)
        past = tl.load(last, mask=filled, other=0) >> (bitmap & 63)
        tl.store(_count_at(facts, row), tl.where(past == 0, count, -1))
    if program == 0:
        number = tl.arange(0, 8)
        tl.store(facts + number, (number == 3).to(tl.int64))  # as `_finite_at` has it
    words = (message + places_at).to(tl.pointer_type(tl.int32), bitcast=True)
    found = 0
    for tile in range(tiles):
        which = chunk.to(tl.int64) * tiles + tile
        first = which * TILE
        if first < bitmap:
            found += tl.sum(bits_at(words, first + tl.arange(0, TILE), bitmap), axis=0)
        if plain == 0:
            word = (row.to(tl.int64) * chunks * tiles + which) * (TILE // 32)
            tl.store(masks + word + tl.arange(0, TILE // 32), tl.zeros([TILE // 32], tl.int32))
    tl.store(counts + program, found)
    tl.store(placed + program, tl.where(plain, found, 0))


@triton.jit
def _low_at(words, start, low_bits, kept):
    """Return the low bits of indices that begin at these bits."""
    word, shift = start >> 5, start & 31
    lower = tl.load(words + word, mask=kept, other=0).to(tl.int64) & 0xFFFFFFFF
    goes_on = kept & (shift + low_bits > 32)
    upper = tl.load(words + word + 1, mask=goes_on, other=0).to(tl.int64) << 32
    one = tl.zeros_like(start) + 1
    return ((upper | lower) >> shift) & ((one << low_bits) - 1)


@triton.jit
def _indices_at(words, bit, number, kept, bitmap, low_bits, length):
    """Return the indices of bits of the bitmap, and which are too large or not above the last."""
    start = bitmap + number * low_bits
    low = _low_at(words, start, low_bits, kept)
    index = ((bit - number) << low_bits) | low
    # Indices with the same upper bits have bits one after another.
    follows = kept & (bits_at(words, tl.maximum(bit - 1, 0), bitmap) != 0) & (bit > 0)
    before = _low_at(words, start - low_bits, low_bits, follows)
    return index, (kept & (index >= length)) | (follows & (before >= low))


@triton.jit(
    do_not_specialize=[
        *("size", "ranks", "block_bits", "fixed", "own", "row_bytes", "chunks", "tiles")
    ]
)
def _place(
    messages, row_bytes, facts, masks, counts, placed,
    fixed, own, size, ranks, block_bits, chunks, tiles,
    BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Set a bit of the region for each index of a chunk of the bitmap, and say what is wrong."""
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    region = tl.where(fixed < 0, row, fixed)
    length = length_of(size, ranks, block_bits, region).to(tl.int64)
    message = messages + row.to(tl.int64) * row_bytes
    told = tl.load(_count_at(facts, row))
    count = tl.maximum(told, 0)
    _, places_at, _, bitmap, low_bits, plain = parts_of(count, length, BITS, GROUP)
    start, total = add_up(counts + row * chunks, chunk, chunks, CHUNKS)
    wrong = (total != told).to(tl.int32)
    words = (message + places_at).to(tl.pointer_type(tl.int32), bitcast=True)
    for tile in range(tiles):
        first = (chunk.to(tl.int64) * tiles + tile) * TILE
        if first < tl.where(plain, 0, bitmap):  # a plain bitmap is what this makes of others
            bit = first + tl.arange(0, TILE)
            found = bits_at(words, bit, bitmap)
            number = start + tl.cumsum(found, axis=0) - found
            start += tl.sum(found, axis=0)
            kept = (found != 0) & (number < count)
            index, bad = _indices_at(words, bit, number, kept, bitmap, low_bits, length)
            wrong += tl.sum(bad.to(tl.int32), axis=0)
            inside = kept & (index < length)
            one = tl.zeros([TILE], tl.int32) + 1
            to = masks + row.to(tl.int64) * chunks * tiles * (TILE // 32) + (index >> 5)
            tl.atomic_or(to, one << (index & 31).to(tl.int32), mask=inside, sem="relaxed")
            to = placed + row * chunks + index // (tiles * TILE)
            tl.atomic_add(to, one, mask=inside, sem="relaxed")
    if row != own:
        if wrong > 0:
            tl.store(_fault_at(facts), 1)
            tl.store(_finite_at(facts), 0)
        if chunk == 0:
            word = message.to(tl.pointer_type(tl.int64), bitcast=True)
            if (tl.load(word) & non_finite(True)) != 0:
                tl.store(_finite_at(facts), 0)
            tl.atomic_add(facts, count, sem="relaxed")


@triton.jit
def _read_tile(
    messages, row_bytes, facts, masks, row, length, place, start, words,
    BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the values of a tile of a region, from number ``start`` of a row's message on.

    And which of its places have one, and how many do. A row has ``words`` in the masks.
    """
    count = tl.maximum(tl.load(_count_at(facts, row)), 0)
    codes_at, places_at = codes_span(count, BITS, GROUP)
    message = messages + tl.cast(row, tl.int64) * row_bytes
    if is_plain(count, length):
        whole = (message + places_at).to(tl.pointer_type(tl.int32), bitcast=True)
        bits = bits_at(whole, place, length)
    else:
        bits = bits_at(masks + tl.cast(row, tl.int64) * words, place, length)
    number = start + tl.cumsum(bits, axis=0) - bits
    kept = (bits != 0) & (number < count)
    values = values_at(message, codes_at, number, kept, BITS, GROUP, TILE)
    return values, kept, tl.sum(bits, axis=0)


class Added(NamedTuple):
    """What adding messages to a region tells, each ``[]``: whether all that came is finite, and
    whether some is bad (bool), and by how much the region's magnitude fell (float64).
    """

    finite: Tensor
    fault: Tensor
    magnitude: Tensor


class _Arrived(NamedTuple):
    """Messages of which the places are known: what kernels get, and what is known of all."""

    messages: tuple[Tensor, int, Tensor, Tensor, Tensor]
    layout: tuple[int, ...]
    chunks: int
    facts: Tensor

    def flags(self) -> tuple[Tensor, Tensor]:
        """Return whether all is finite, and whether a message is bad."""
        flags = self.facts.view(torch.bool)  # the first of eight bytes, of 0 or 1
        return flags[8 * 3], flags[8 * 4]


def _read(messages: Tensor, leg: Leg, region: int, own: int) -> _Arrived:
    """Find the places of messages, each about its rank's region, or all about one."""
    regions, stride, tile = leg.regions, messages.shape[1], _message.TILE
    grid = grid_of(regions.length(0))
    programs = regions.ranks * grid.chunks
    facts = messages.new_empty(_FACTS + regions.ranks + grid.chunks, dtype=torch.int64)
    masks = messages.new_empty(programs * grid.tiles * tile // 32, dtype=torch.int32)
    counts, placed = pair(messages, programs)
    layout = (*layout_of(leg), *grid)
    launch(
        _count, programs, messages, stride, facts, masks, counts, placed, *kind_of(leg),
        region, own, *layout, BITS=leg.bits, GROUP=leg.group, TILE=tile, num_warps=WARPS,
    )  # fmt: skip
    launch(
        _place, programs, messages, stride, facts, masks, counts, placed, region, own, *layout,
        BITS=leg.bits, GROUP=leg.group, TILE=tile, CHUNKS=_message.CHUNKS, num_warps=WARPS,
    )  # fmt: skip
    return _Arrived((messages, stride, facts, masks, placed), layout, grid.chunks, facts)


_OVERFLOWS = {torch.float32: 0x7F800000, torch.float16: 0x477FF000, torch.bfloat16: 0x7F7F8000}
"""The bits of the least magnitude that becomes infinite in a dtype."""


@triton.jit(
    do_not_specialize=["size", "ranks", "block_bits", "own", "row_bytes", "chunks", "tiles"]
)
def _add(
    x, messages, row_bytes, facts, masks, placed,
    own, size, ranks, block_bits, chunks, tiles,
    BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
    SOURCES: tl.constexpr,
):  # fmt: skip
    """Add the messages of all rows to a chunk of the own region, in order."""
    chunk = tl.program_id(0)
    length = length_of(size, ranks, block_bits, own).to(tl.int64)
    source = tl.arange(0, SOURCES)
    starts = tl.zeros([SOURCES], tl.int32)  # how many values of each message are used
    for row in range(ranks):
        before, _ = add_up(placed + row * chunks, chunk, chunks, CHUNKS)
        starts = tl.where(source == row, before, starts)
    fell = tl.zeros([1], tl.float64)
    for tile in range(tiles):
        first = (chunk.to(tl.int64) * tiles + tile) * TILE
        if first < length:
            place, at = tile_of(first, ranks, block_bits, own, TILE)
            value = tl.load(x + at, mask=at < size, other=0.0)
            old = value
            for row in range(ranks):
                if row != own:
                    words = chunks * tiles * (TILE // 32)
                    start = tl.sum(tl.where(source == row, starts, 0), axis=0)
                    added, kept, found = _read_tile(
                        messages, row_bytes, facts, masks, row, length, place, start, words,
                        BITS, GROUP, TILE,
                    )  # fmt: skip
                    value = tl.where(kept, value + added, value)
                    starts += tl.where(source == row, found, 0)
            tl.store(x + at, value, mask=at < size)
            fell += tl.sum((tl.abs(old) - tl.abs(value)).to(tl.float64), axis=0)
    _add_fell(tl.sum(fell, axis=0), facts, ranks)


@triton.jit(do_not_specialize=["size", "ranks", "block_bits", "row_bytes", "chunks", "tiles"])
def _write(
    out, messages, row_bytes, facts, masks, placed, divisor,
    size, ranks, block_bits, chunks, tiles,
    OVERFLOWS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write the values of a chunk of a region over the divisor."""
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    length = length_of(size, ranks, block_bits, row).to(tl.int64)
    start, _ = add_up(placed + row * chunks, chunk, chunks, CHUNKS)
    peak = 0
    for tile in range(tiles):
        first = (chunk.to(tl.int64) * tiles + tile) * TILE
        if first < length:
            place, at = tile_of(first, ranks, block_bits, row, TILE)
            words = chunks * tiles * (TILE // 32)
            value, kept, found = _read_tile(
                messages, row_bytes, facts, masks, row, length, place, start, words,
                BITS, GROUP, TILE,
            )  # fmt: skip
            start += found
            value = tl.where(kept, tl.div_rn(value, tl.zeros_like(value) + divisor), 0.0)
            tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)
            magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            peak = tl.maximum(peak, tl.max(magnitude, axis=0))
    if peak >= OVERFLOWS:
        tl.store(_finite_at(facts), 0)


def add(x: Tensor, arrived: Tensor, up: Leg, rank: int) -> Added:
    """Add what others sent to the own region of x, in the order of ranks."""
    came = _read(arrived, up, rank, rank)
    launch(
        _add, came.chunks, x, *came.messages, rank, *came.layout,
        BITS=up.bits, GROUP=up.group, TILE=_message.TILE, CHUNKS=_message.CHUNKS,
        SOURCES=triton.next_power_of_2(up.regions.ranks), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return Added(*came.flags(), came.facts.view(torch.float64)[1])


def deliver(returned: Tensor, down: Leg, divisor: float, out: Tensor) -> Delivered:
    """Write what owners returned, over the divisor."""
    came = _read(returned, down, -1, -1)
    launch(
        _write, down.regions.ranks * came.chunks, out, *came.messages, float(divisor),
        *came.layout, OVERFLOWS=_OVERFLOWS[out.dtype], BITS=down.bits, GROUP=down.group,
        TILE=_message.TILE, CHUNKS=_message.CHUNKS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return Delivered(came.facts[0], *came.flags())
