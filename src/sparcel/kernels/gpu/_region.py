"""Regions, for kernels: where coordinates lie, and how programs share them and add up.

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
