"""The largest entries of every chunk of a vector, on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.definitions.common import index_dtype
from sparcel.kernels.gpu._bits import bits_width, magnitude_bits
from sparcel.kernels.gpu._launch import launch

_TILE = 4096


@triton.jit
def _load_rows(x, size, chunk, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows' numbers, the places of a tile of each, and the values and bits there."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None] * chunk + column[None, :]
    inside = (column[None, :] < chunk) & (place < size)
    value = tl.load(x + place, mask=inside, other=0.0)
    return row, place, value, magnitude_bits(value)


@triton.jit
def _find(
    x, size, chunk, k, rows, kth, room, counts,
    WIDTH: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Find the k-th largest of each row, bit by bit."""
    row, _, _, bits = _load_rows(x, size, chunk, 0, ROWS, COLUMNS)
    nonzeros = tl.zeros((ROWS,), tl.int32)
    for tile in range(TILES):
        _, _, _, bits = _load_rows(x, size, chunk, tile, ROWS, COLUMNS)
        nonzeros += tl.sum((bits != 0).to(tl.int32), axis=1)
    needed = tl.minimum(nonzeros, k)
    found = tl.zeros((ROWS,), bits.dtype)
    for step in range(WIDTH):
        tried = found | (tl.full((ROWS,), 1, bits.dtype) << (WIDTH - 1 - step))
        reaching = tl.zeros((ROWS,), tl.int32)
        for tile in range(TILES):
            _, _, _, bits = _load_rows(x, size, chunk, tile, ROWS, COLUMNS)
            reaching += tl.sum((bits >= tried[:, None]).to(tl.int32), axis=1)
        found = tl.where(reaching >= needed, tried, found)
    larger = tl.zeros((ROWS,), tl.int32)
    for tile in range(TILES):
        _, _, _, bits = _load_rows(x, size, chunk, tile, ROWS, COLUMNS)
        larger += tl.sum((bits > found[:, None]).to(tl.int32), axis=1)
    there = row < rows
    tl.store(kth + row, found.to(tl.int64), mask=there)
    tl.store(room + row, needed - larger, mask=there)
    tl.store(counts + row, needed.to(tl.int64), mask=there)


@triton.jit
def _emit(
    x, size, chunk, rows, kth, room, before, indices, values, cleared,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    limit = tl.load(kth + row, mask=there, other=0)
    left = tl.load(room + row, mask=there, other=0)
    slot = tl.load(before + row - 1, mask=there & (row > 0), other=0)
    for tile in range(TILES):
        _, place, value, bits = _load_rows(x, size, chunk, tile, ROWS, COLUMNS)
        tie = (bits == limit[:, None]) & (bits != 0)
        number = tl.cumsum(tie.to(tl.int32), axis=1)
        chosen = (bits > limit[:, None]) | (tie & (number <= left[:, None]))
        order = tl.cumsum(chosen.to(tl.int32), axis=1)
        to = slot[:, None] + order - 1
        tl.store(indices + to, place.to(indices.dtype.element_ty), mask=chosen)
        tl.store(values + to, value, mask=chosen)
        if CLEAR:
            tl.store(cleared + place, tl.zeros_like(value), mask=chosen)
        left -= tl.sum(tie.to(tl.int32), axis=1)
        slot += tl.sum(chosen.to(tl.int32), axis=1)


def largest_of_chunks(
    x: Tensor, k: int, chunk: int, clear: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the min(k, nonzeros) largest of every ``chunk`` entries, and their number.

    Parameters
    ----------
    k, chunk
        At least 1.
    clear
        Whether what is selected is set to 0 in ``x``.

    Returns
    -------
    indices, values
        Memory for as many as there can be.
    count
        int64 ``[1]``, on the device.
    """
    size = x.numel()
    rows, columns = -(-size // chunk), min(_TILE, triton.next_power_of_2(chunk))
    shape = {
        "TILES": -(-chunk // columns),
        "ROWS": _TILE // columns,
        "COLUMNS": columns,
    }
    kth, counts = x.new_empty(2, rows, dtype=torch.int64)
    room = x.new_empty(rows, dtype=torch.int32)
    programs = -(-rows // shape["ROWS"])
    launch(
        _find, programs, x, size, chunk, k, rows, kth, room, counts,
        WIDTH=bits_width(x.dtype), **shape,
    )  # fmt: skip
    before = counts.cumsum(dim=0)
    most = min(k, chunk) * (size // chunk) + min(k, size % chunk)
    indices, values = x.new_empty(most, dtype=index_dtype(size)), x.new_empty(most)
    launch(
        _emit, programs, x, size, chunk, rows, kth, room, before, indices, values, x,
        CLEAR=clear, **shape,
    )  # fmt: skip
    return indices, values, before[-1:]
