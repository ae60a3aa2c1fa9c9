"""Reads messages of selected coordinates, on a GPU: what others sent, and what owners returned.

After the kernels of `_arrived`, a third one reads the values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.gpu import _region
from sparcel.kernels.gpu._arrived import Added, add_fell, finite_at, read, read_tile
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.gpu._region import WARPS, add_up, length_of, tile_of
from sparcel.kernels.phase import Phase

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
                    added, kept, found = read_tile(
                        messages, row_bytes, facts, masks, row, length, place, start, words,
                        BITS, GROUP, TILE,
                    )  # fmt: skip
                    value = tl.where(kept, value + added, value)
                    starts += tl.where(source == row, found, 0)
            tl.store(x + at, value, mask=at < size)
            fell += tl.sum((tl.abs(old) - tl.abs(value)).to(tl.float64), axis=0)
    add_fell(tl.sum(fell, axis=0), facts, ranks)


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
            value, kept, found = read_tile(
                messages, row_bytes, facts, masks, row, length, place, start, words,
                BITS, GROUP, TILE,
            )  # fmt: skip
            start += found
            value = tl.where(kept, tl.div_rn(value, tl.zeros_like(value) + divisor), 0.0)
            tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)
            magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            peak = tl.maximum(peak, tl.max(magnitude, axis=0))
    if peak >= OVERFLOWS:
        tl.store(finite_at(facts), 0)


def add(x: Tensor, arrived: Tensor, up: Phase, rank: int) -> Added:
    """Add what others sent to the own region of x, in the order of ranks."""
    came = read(arrived, up, rank, rank)
    launch(
        _add, came.chunks, x, *came.messages, rank, *came.layout,
        BITS=up.bits, GROUP=up.group, TILE=_region.TILE, CHUNKS=_region.CHUNKS,
        SOURCES=triton.next_power_of_2(up.regions.ranks), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return Added(*came.flags(), came.fell())


def deliver(
    returned: Tensor, down: Phase, divisor: float, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write what owners returned, over the divisor: the entries, whether finite, the fault."""
    came = read(returned, down, -1, -1)
    launch(
        _write, down.regions.ranks * came.chunks, out, *came.messages, float(divisor),
        *came.layout, OVERFLOWS=_OVERFLOWS[out.dtype], BITS=down.bits, GROUP=down.group,
        TILE=_region.TILE, CHUNKS=_region.CHUNKS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return came.facts[0], *came.flags()
