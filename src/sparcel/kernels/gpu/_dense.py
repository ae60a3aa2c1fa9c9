"""Messages of regions of which everything travels: their headers, and tiles of their values.

The headers and the places of scales and codes follow from the regions' lengths. Only the flag for
what is not finite depends on the data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparcel.kernels.gpu._coding import decode_rows, load_codes
from sparcel.kernels.gpu._message import (
    codes_at,
    codes_span,
    header_of,
    non_finite,
    scales_at,
    write_rows,
)
from sparcel.kernels.gpu._region import length_of


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
    low, high = scales_at(message, row, row * GROUP < length, BITS)
    codes, eight, bytes = codes_at(message, place, length, TILE, BITS, GROUP)
    code = load_codes(codes, eight, bytes, BITS, True, ROWS, GROUP)
    return tl.reshape(decode_rows(code, low, high, BITS, BITS == 2), [TILE])
