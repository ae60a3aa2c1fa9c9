"""Regions and their messages, for kernels: where coordinates lie, and the parts of a message.

A region is cut into chunks of whole tiles, and a program takes one chunk. There are so few chunks
that a program can add up the counts of all before its own.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.gpu._coding import decode_rows
from sparcel.kernels.phase import Phase

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


def layout_of(phase: Phase) -> tuple[int, int, int]:
    """Return the size, the ranks, and the binary logarithm of a block."""
    regions = phase.regions
    return regions.size, regions.ranks, regions.block.bit_length() - 1


def pair(beside: Tensor, programs: int) -> tuple[Tensor, Tensor]:
    """Return memory for two numbers (int32) of each program, aligned so that kernels know it."""
    first, second = beside.new_empty((2, -(-programs // 4) * 4), dtype=torch.int32).unbind()
    return first, second


def kind_of(phase: Phase) -> tuple[int, int]:
    """Return the two words with which headers begin; the region's length is the third."""
    begins, detail = struct.unpack_from("<qq", phase.headers[0])
    return begins, detail


@triton.jit
def length_of(size, ranks, block_bits, owner):
    """Return the length of a region, like `sparcel.kernels.Regions.length`."""
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
def codes_of(count, BITS: tl.constexpr, GROUP: tl.constexpr):
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
    codes_at, places_at = codes_of(count, BITS, GROUP)
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
def values_at(
    message, codes_at, number, kept, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Return the values of a message that have these numbers, where they are ``kept``."""
    EACH: tl.constexpr = 8 // BITS
    byte = tl.load(message + codes_at + number // EACH, mask=kept, other=0).to(tl.int32)
    code = (byte >> (number % EACH * BITS)) & (2**BITS - 1)
    scales = (message + 40).to(tl.pointer_type(tl.int16), bitcast=True)
    group = number // GROUP
    if BITS == 2:
        low = _scale_at(scales + 2 * group, kept)
        high = _scale_at(scales + 2 * group + 1, kept)
    else:
        low = _scale_at(scales + group, kept)
        high = low
    return tl.reshape(decode_rows(code[:, None], low, high, BITS, BITS == 2), [TILE])


@triton.jit
def _scale_at(scales, kept):
    bits = tl.load(scales, mask=kept, other=0).to(tl.int32) << 16  # bfloat16's
    return bits.to(tl.float32, bitcast=True)


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
