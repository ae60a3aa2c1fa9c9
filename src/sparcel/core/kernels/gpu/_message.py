"""Regions and their messages, for kernels.

A region is cut into chunks of whole tiles, and a program takes one chunk. There are so few chunks
that a program can add up the counts of all before its own.

Of a message of all coordinates, the header and the places of scales and codes follow from the
regions' lengths. Only the flag for what is not finite depends on the data.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core.kernels.gpu.few_bits import (
    decode_rows,
    encode_rows,
    load_codes,
    scale_bits,
    store_codes,
)
from sparcel.core.kernels.regions import Leg

TILE = 2048
"""Coordinates that a program takes at a time."""
WARPS = 8
"""So that a lane holds eight of them."""
CHUNKS = 1024
"""The most chunks of a region; a power of two."""


class Grid(NamedTuple):
    """How programs divide a region among themselves."""

    chunks: int
    tiles: int
    """The tiles of a chunk."""


def grid_of(entries: int, tile: int = 0) -> Grid:
    """Return the grid of a region, or of so many entries of it in tiles of another length."""
    tiles = max(1, triton.cdiv(entries, tile or TILE))
    each = triton.cdiv(tiles, CHUNKS)
    return Grid(triton.cdiv(tiles, each), each)


def layout_of(leg: Leg) -> tuple[int, int, int]:
    """Return the size, the ranks, and the binary logarithm of a block."""
    regions = leg.regions
    return regions.size, regions.ranks, regions.block.bit_length() - 1


def pair(beside: Tensor, programs: int) -> tuple[Tensor, Tensor]:
    """Return memory for two numbers (int32) of each program, aligned so that kernels know it."""
    first, second = beside.new_empty((2, -(-programs // 4) * 4), dtype=torch.int32).unbind()
    return first, second


def kind_of(leg: Leg) -> tuple[int, int]:
    """Return the two words with which headers begin; the region's length is the third."""
    begins, detail = struct.unpack_from("<qq", leg.headers[0])
    return begins, detail


@triton.jit
def length_of(size, ranks, block_bits, owner):
    """Return the length of a region, like `sparcel.core.kernels.Regions.length`."""
    whole = size >> block_bits
    owned = (whole + (ranks - 1 - owner)) // ranks
    rest = size - (whole << block_bits)
    return (owned << block_bits) + tl.where(whole % ranks == owner, rest, 0)


@triton.jit
def skipped(place, ranks, block_bits, owner):
    """Return how many coordinates of others lie before places (int64) of a region."""
    return ((place >> block_bits) * (ranks - 1) + owner) << block_bits


@triton.jit
def tile_of(first, ranks, block_bits, owner, TILE: tl.constexpr):
    """Return the places of a tile, and their coordinates, also past the vector's end."""
    place = first + tl.arange(0, TILE)
    at = place + skipped(place, ranks, block_bits, owner)
    return place, tl.max_contiguous(tl.multiple_of(at, 64), 64)  # blocks are as long, at least


@triton.jit
def add_up(counts, chunk, chunks, CHUNKS: tl.constexpr):
    """Return the sum of the counts before a chunk's, and of all."""
    number = tl.arange(0, CHUNKS)
    found = tl.load(counts + number, mask=number < chunks, other=0)
    return tl.sum(tl.where(number < chunk, found, 0), axis=0), tl.sum(found, axis=0)


@triton.jit
def add_last(number, partials, ticket, sum):
    """Write this program's float64 number; the last program adds all, in order, to the sum.

    ``ticket`` was 0 before. Each has 64 bits.
    """
    programs = tl.num_programs(0)
    partials = partials.to(tl.pointer_type(tl.float64), bitcast=True)
    sum = sum.to(tl.pointer_type(tl.float64), bitcast=True)
    tl.store(partials + tl.program_id(0), number)
    tl.debug_barrier()  # the number is written before the ticket is drawn
    ticket = ticket.to(tl.pointer_type(tl.int32), bitcast=True)
    if tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1:
        total = tl.zeros([1024], tl.float64)
        for first in range(0, programs, 1024):
            place = first + tl.arange(0, 1024)
            # Past the first cache, which does not see what other processors write.
            total += tl.load(
                partials + place, mask=place < programs, other=0.0, cache_modifier=".cg"
            )
        tl.store(sum, tl.load(sum) + tl.sum(total, axis=0))


@triton.jit
def header_of(lane, begins, detail, length, count, end):
    """Return words of the header of a message of ``count`` of ``length`` coordinates.

    There are five, of 64 bits: kind and flags, detail, size, count, and the length in bytes.
    """
    counts = tl.where(lane == 2, length, tl.where(lane == 3, count, end))
    return tl.where(lane == 0, begins, tl.where(lane == 1, detail, counts))


@triton.jit
def non_finite(there):
    """Return the flag for what is not finite in the first word of a header, or 0."""
    return tl.where(there, 2 << 56, 0)


@triton.jit
def is_plain(count, length):
    """Return whether the places of so many coordinates are a bitmap of all."""
    return count > (length >> 2)


@triton.jit
def codes_span(count, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return where the codes of a message of ``count`` values (int64) begin and end; the header
    takes 40 bytes.
    """
    groups = (count + (GROUP - 1)) // GROUP
    scales = 4 * groups if BITS == 2 else 2 * groups
    codes_at = 40 + ((scales + 7) >> 3 << 3)
    return codes_at, codes_at + ((count * BITS + 63) >> 6 << 3)


@triton.jit
def parts_of(count, length, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return how a message of ``count`` of ``length`` coordinates, both int64, is laid out.

    Where the codes and the places begin, the bytes of all, the bits of the bitmap, the low bits of
    an index, and whether the bitmap is one of all coordinates; see `kernels.pack_indices`.
    """
    codes_at, places_at = codes_span(count, BITS, GROUP)
    plain = is_plain(count, length)
    ratio = length // tl.maximum(count, 1)
    low_bits = tl.sum(((ratio >> tl.arange(0, 32)) > 0).to(tl.int64), axis=0) - 1
    low_bits = tl.where(plain | (count == 0), 0, low_bits)
    bitmap = tl.where(plain, length, count + ((length - 1) >> low_bits))
    bitmap = tl.where(count == 0, 0, bitmap)
    end = places_at + ((bitmap + count * low_bits + 63) >> 6 << 3)
    return codes_at, places_at, end, bitmap, low_bits, plain


@triton.jit
def bits_at(words, place, end):
    """Return bits (int32) of a bitmap, int32; 0 from ``end`` on."""
    content = tl.load(words + (place >> 5), mask=place < end, other=0)
    return (content >> (place & 31).to(tl.int32)) & 1


@triton.jit
def _scales(message, BITS: tl.constexpr):
    """Return where the scales are, after the header: one of 16 bits a row, or two."""
    if BITS == 2:
        scales = (message + 40).to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        scales = (message + 40).to(tl.pointer_type(tl.int16), bitcast=True)
    return scales


@triton.jit
def _scales_at(message, row, kept, BITS: tl.constexpr):
    """Return the scales of rows of a message; the second of two is for odd codes."""
    found = tl.load(_scales(message, BITS) + row, mask=kept, other=0).to(tl.int32)
    low, high = found << 16, found & -65536
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def codes_at(message, number, count, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return a message's codes, which groups of 8 of them a tile has, and the bytes of all.

    The tile begins at a ``number`` of the message's ``count`` values.
    """
    begin, _ = codes_span(count, BITS, GROUP)
    return message + begin, number // 8 + tl.arange(0, TILE // 8), (count * BITS + 7) >> 3


@triton.jit
def write_rows(
    x, message, first, count, BITS: tl.constexpr, ROWS: tl.constexpr, LOG_GROUP: tl.constexpr
):
    """Write values, of which there are ``count``, to a message, from row ``first`` on.

    Return what rounding takes of them, and which rows are finite. Values past the last are 0.
    """
    GROUP: tl.constexpr = 1 << LOG_GROUP
    row = first + tl.arange(0, ROWS)
    length = tl.minimum(tl.maximum(count - row * GROUP, 1), GROUP)
    code, low, high, finite = encode_rows(x, length, 0, BITS, ROWS, LOG_GROUP, False, True)
    bits = scale_bits(low, True)
    if BITS == 2:
        bits = bits | (scale_bits(high, True) << 16)
    scales = _scales(message, BITS)
    tl.store(scales + row, bits.to(scales.dtype.element_ty), mask=row * GROUP < count)
    codes, eight, bytes = codes_at(message, first * GROUP, count, ROWS * GROUP, BITS, GROUP)
    store_codes(codes, eight, bytes, code, BITS, True)
    return x - decode_rows(code, low, high, BITS, BITS == 2), finite


@triton.jit
def values_at(
    message, begin, number, kept, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Return the values of a message that have these numbers, where they are ``kept``.

    Its codes ``begin`` after so many bytes.
    """
    bit = number * BITS
    byte, shift = message + begin + (bit >> 3), (bit & 7).to(tl.int32)
    found = tl.load(byte, mask=kept, other=0).to(tl.int32)
    if 8 % BITS != 0:  # a code may go on in the next byte
        goes_on = kept & (shift + BITS > 8)
        found |= tl.load(byte + 1, mask=goes_on, other=0).to(tl.int32) << 8
    code = (found >> shift) & (2**BITS - 1)
    low, high = _scales_at(message, number // GROUP, kept, BITS)
    return tl.reshape(decode_rows(code[:, None], low, high, BITS, BITS == 2), [TILE])


@triton.jit
def rows_from(first):
    """Return the numbers of rows whose headers are read or written together, ``[64, 1]``."""
    return first + tl.arange(0, 64)[:, None]


@triton.jit
def _word_pointers(messages, row, stride):
    """Return pointers to the words of the headers in rows ``[64, 1]``."""
    header = messages + row.to(tl.int64) * stride
    return header.to(tl.pointer_type(tl.int64), bitcast=True) + tl.arange(0, 8)[None, :]


@triton.jit
def check(
    came, stride, rank, size, ranks, block_bits, begins, detail,
    OWN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tell whether a message says that it is not finite, and whether a header is a wrong one.

    All messages but the own are about the ``OWN`` region; or each, the own too, about its rank's.
    """
    lane = tl.arange(0, 8)[None, :]
    bad, fault = tl.zeros([64, 8], tl.int32), tl.zeros([64, 8], tl.int32)
    for first in range(0, ranks, 64):
        row = rows_from(first)
        there = (row < ranks) & (lane < 5)
        region = row
        if OWN:
            there = there & (row != rank)
            region = tl.zeros_like(row) + rank
        length = length_of(size, ranks, block_bits, region).to(tl.int64)
        _, end = codes_span(length, BITS, GROUP)
        expected = header_of(lane, begins, detail, length, length, end)
        found = tl.load(_word_pointers(came, row, stride), mask=there, other=0)
        differing = tl.where(there, found ^ expected, 0)
        flag = non_finite(lane == 0)
        bad |= ((differing & flag) != 0).to(tl.int32)
        fault |= ((differing & ~flag) != 0).to(tl.int32)
    fault_anywhere = tl.max(tl.max(fault, axis=1), axis=0)
    return tl.maximum(tl.max(tl.max(bad, axis=1), axis=0), fault_anywhere), fault_anywhere


@triton.jit
def begin_rows(
    messages, stride, first, rows, region, bad, size, ranks, block_bits, begins, detail,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write headers, and the padding of scales and codes, before these are written over it.

    ``region`` is that of each row ``[64, 1]``; ``bad`` is whether the header says so.
    """
    lane = tl.arange(0, 8)[None, :]
    row = rows_from(first)
    length = length_of(size, ranks, block_bits, region).to(tl.int64)
    begin, end = codes_span(length, BITS, GROUP)
    header = header_of(lane, begins | non_finite(bad != 0), detail, length, length, end)
    to = _word_pointers(messages, row, stride)
    tl.store(to, header, mask=(row < rows) & (lane < 5))
    padding = (tl.where(lane == 0, begin, end) >> 3) - 1 - lane
    zero = tl.zeros([64, 8], tl.int64)
    tl.store(to + padding, zero, mask=(row < rows) & (lane < 2) & (length > 0))


@triton.jit
def write_tile(
    x, message, place, length, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LOG_GROUP: tl.constexpr,
):  # fmt: skip
    """Write a tile of a region from a place on to its message; return what rounding takes."""
    rows = tl.reshape(x, [TILE // GROUP, GROUP])
    rest, finite = write_rows(rows, message, place // GROUP, length, BITS, TILE // GROUP, LOG_GROUP)
    bad = tl.max((finite == 0).to(tl.int32), axis=0) != 0
    flags = tl.load(message + 7, mask=bad, other=0)
    tl.store(message + 7, flags | 2, mask=bad)  # whoever writes writes the same
    return tl.reshape(rest, [TILE])


@triton.jit
def read_tile(message, place, length, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return a tile of a region from a place on."""
    ROWS: tl.constexpr = TILE // GROUP
    row = place // GROUP + tl.arange(0, ROWS)
    low, high = _scales_at(message, row, row * GROUP < length, BITS)
    codes, eight, bytes = codes_at(message, place, length, TILE, BITS, GROUP)
    code = load_codes(codes, eight, bytes, BITS, True, ROWS, GROUP)
    return tl.reshape(decode_rows(code, low, high, BITS, BITS == 2), [TILE])
