"""Passes over regions of which everything travels: a tile is read once, and rounded where it is.

Each pass takes two launches. The first, of one program, begins the outgoing messages and checks the
headers of those that came; the second is over the vector. Of a dense message only the flag for what
is not finite depends on the data, so all the rest is known before.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.addition import Addition
from sparcel.kernels.gpu._bits import bits_of, magnitude_bits
from sparcel.kernels.gpu._coding import decode_rows, encode_rows, pack, scale_bits, unpack
from sparcel.kernels.gpu._compact import load_inside
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.phase import Phase

_TILE = 2048  # the most coordinates a program; they lie in one block
_WARPS = 8  # so a lane holds 8 coordinates of a whole tile
_ROW = 16  # the rows of messages begin at multiples of it

_HEADER = tl.constexpr(40)
_WORDS = tl.constexpr(5)  # of 64 bits: kind and flags, detail, size, count, length
_FLAGS = tl.constexpr(7)  # the place of the flags
_NON_FINITE = tl.constexpr(2)  # one of them
_NON_FINITE_BIT = tl.constexpr(2 << 56)  # in the first word
_ROWS = tl.constexpr(64)  # headers at a time

_FIRST_PART = tl.constexpr(2)  # after the sum, and the number of programs that are done
_SUMMED = tl.constexpr(2048)  # parts at a time


@triton.jit
def _length(region, size, ranks, log_block):
    """Return how many coordinates a region has (int64)."""
    blocks = size >> log_block  # whole ones
    turns = blocks // ranks
    left = blocks - turns * ranks
    rest = tl.where(region == left, size - (blocks << log_block), 0)
    return (((turns + (region < left).to(tl.int32)) << log_block) + rest).to(tl.int64)


@triton.jit
def _codes_at(length, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return where a message's codes begin, after the header and the scales."""
    SCALE_BYTES: tl.constexpr = 4 if BITS == 2 else 2
    return _HEADER + ((length + GROUP - 1) // GROUP * SCALE_BYTES + 7) // 8 * 8


@triton.jit
def _end(length, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return how many bytes a message has."""
    return _codes_at(length, BITS, GROUP) + (length * BITS + 63) // 64 * 8


@triton.jit
def _header(length, begins, detail, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return the words of headers of messages about so many coordinates, ``[ROWS, 8]``."""
    lane = tl.arange(0, 8)[None, :]
    counts = tl.where(lane < 4, length, _end(length, BITS, GROUP))
    return tl.where(lane == 0, begins, tl.where(lane == 1, detail, counts))


@triton.jit
def _word_pointers(messages, row, stride):
    """Return pointers to the words of the headers in rows ``[ROWS, 1]``, and two more."""
    header = messages + row.to(tl.int64) * stride
    return header.to(tl.pointer_type(tl.int64), bitcast=True) + tl.arange(0, 8)[None, :]


@triton.jit
def _check(
    came, stride, rank, size, ranks, log_block, begins, detail,
    OWN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tell whether a message says that it is not finite, and whether a header is a wrong one.

    All messages but the own are about the ``OWN`` region; or each, the own too, about its rank's.
    """
    lane = tl.arange(0, 8)[None, :]
    bad, fault = tl.zeros([_ROWS, 8], tl.int32), tl.zeros([_ROWS, 8], tl.int32)
    for first in range(0, ranks, _ROWS):
        row = first + tl.arange(0, _ROWS)[:, None]
        there = (row < ranks) & (lane < _WORDS)
        region = row
        if OWN:
            there = there & (row != rank)
            region = tl.zeros_like(row) + rank
        expected = _header(_length(region, size, ranks, log_block), begins, detail, BITS, GROUP)
        found = tl.load(_word_pointers(came, row, stride), mask=there, other=0)
        differing = tl.where(there, found ^ expected, 0)
        flag = tl.where(lane == 0, _NON_FINITE_BIT, 0)
        bad |= ((differing & flag) != 0).to(tl.int32)
        fault |= ((differing & ~flag) != 0).to(tl.int32)
    fault_anywhere = tl.max(tl.max(fault, axis=1), axis=0)
    return tl.maximum(tl.max(tl.max(bad, axis=1), axis=0), fault_anywhere), fault_anywhere


@triton.jit
def _begin_rows(
    messages, stride, first, rows, region, bad, size, ranks, log_block, begins, detail,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write headers, and the padding of scales and codes, before these are written over it.

    ``region`` is that of each row ``[ROWS, 1]``; ``bad`` is whether the header says so.
    """
    lane = tl.arange(0, 8)[None, :]
    row = first + tl.arange(0, _ROWS)[:, None]
    length = _length(region, size, ranks, log_block)
    begins = begins | tl.where(bad != 0, _NON_FINITE_BIT, 0)
    header = _header(length, begins, detail, BITS, GROUP)
    to = _word_pointers(messages, row, stride)
    tl.store(to, header, mask=(row < rows) & (lane < _WORDS))
    last_scales = _codes_at(length, BITS, GROUP) // 8 - 1
    last_codes = _end(length, BITS, GROUP) // 8 - 1
    padding = tl.where(lane == 0, last_scales, last_codes) - lane
    zero = tl.zeros([_ROWS, 8], tl.int64)
    tl.store(to + padding, zero, mask=(row < rows) & (lane < 2) & (length > 0))


@triton.jit
def _begin_parts(parts):
    tl.store(parts + tl.arange(0, _FIRST_PART), tl.zeros([_FIRST_PART], tl.float64))


@triton.jit
def _add_up(parts, part):
    """Let the program that is the last to come add up all parts, in the order of programs."""
    programs = tl.num_programs(0)
    tl.store(parts + _FIRST_PART + tl.program_id(0), part)
    done = tl.atomic_add((parts + 1).to(tl.pointer_type(tl.int32), bitcast=True), 1)
    if done == programs - 1:
        number = tl.arange(0, _SUMMED)
        total = tl.zeros([_SUMMED], tl.float64)
        for first in range(0, programs, _SUMMED):
            place = first + number
            # Past the first cache, which does not see what other processors write.
            total += tl.load(
                parts + _FIRST_PART + place, mask=place < programs, other=0.0, cache_modifier=".cg"
            )
        tl.store(parts, tl.sum(total, axis=0))


@triton.jit
def _fall(before, after, TILE: tl.constexpr):
    """Return by how much the sum of magnitudes is smaller (float64)."""
    fell = tl.reshape(tl.abs(before) - tl.abs(after), [TILE // 64, 64])
    return tl.sum(tl.sum(fell, axis=1).to(tl.float64), axis=0)


@triton.jit
def _write(
    x, message, place, length, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LOG_GROUP: tl.constexpr,
):  # fmt: skip
    """Write a tile of a region from a place on to its message; return what rounding takes."""
    ROWS: tl.constexpr = TILE // GROUP
    row = place // GROUP + tl.arange(0, ROWS)
    there = tl.minimum(tl.maximum(length - row * GROUP, 1), GROUP)
    code, low, high, finite = encode_rows(
        tl.reshape(x, [ROWS, GROUP]), there, 0, BITS, ROWS, LOG_GROUP, False, True
    )
    bits = scale_bits(low, True)
    scales = message + _HEADER
    inside = row * GROUP < length
    if BITS == 2:
        bits = bits | (scale_bits(high, True) << 16)
        tl.store(scales.to(tl.pointer_type(tl.int32), bitcast=True) + row, bits, mask=inside)
    else:
        to = scales.to(tl.pointer_type(tl.int16), bitcast=True) + row
        tl.store(to, bits.to(tl.int16), mask=inside)
    words, word, inside = _code_words(message, place, length, TILE, BITS, GROUP)
    tl.store(words + word, pack(code, BITS, 32), mask=inside)
    bad = tl.max((finite == 0).to(tl.int32), axis=0) != 0
    flags = tl.load(message + _FLAGS, mask=bad, other=0)
    tl.store(message + _FLAGS, flags | _NON_FINITE, mask=bad)  # all that write write the same
    return x - tl.reshape(decode_rows(code, low, high, BITS, BITS == 2), [TILE])


@triton.jit
def _code_words(
    message, place, length, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr
):
    """Return where the words of codes are, the numbers of a tile's, and which of these exist."""
    words = message + _codes_at(length, BITS, GROUP)
    word = place * BITS // 32 + tl.arange(0, TILE * BITS // 32)
    return words.to(tl.pointer_type(tl.int32), bitcast=True), word, word * (32 // BITS) < length


@triton.jit
def _read(message, place, length, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return a tile of a region from a place on."""
    ROWS: tl.constexpr = TILE // GROUP
    row = place // GROUP + tl.arange(0, ROWS)
    inside = row * GROUP < length
    scales = message + _HEADER
    if BITS == 2:
        from_ = scales.to(tl.pointer_type(tl.int32), bitcast=True) + row
        both = tl.load(from_, mask=inside, other=0)
        low, high = both << 16, both & -65536
    else:
        from_ = scales.to(tl.pointer_type(tl.int16), bitcast=True) + row
        low = tl.load(from_, mask=inside, other=0).to(tl.int32) << 16
        high = low
    low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    words, word, inside = _code_words(message, place, length, TILE, BITS, GROUP)
    codes = unpack(tl.load(words + word, mask=inside, other=0), BITS, 32, ROWS, GROUP)
    return tl.reshape(decode_rows(codes, low, high, BITS, BITS == 2), [TILE])


@triton.jit
def _begin_enter(
    messages, stride, parts, sent, rank, size, ranks, log_block, begins, detail,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    for first in range(0, ranks, _ROWS):
        region = first + tl.arange(0, _ROWS)[:, None]
        _begin_rows(
            messages, stride, first, ranks, region, 0, size, ranks, log_block, begins, detail,
            BITS, GROUP,
        )  # fmt: skip
    tl.store(sent, size - _length(rank, size, ranks, log_block))
    _begin_parts(parts)


@triton.jit
def _owned(tile, ranks, log_block, TILE: tl.constexpr):
    """Return the owner of a tile of the vector, where it begins there, and where in the region."""
    first = tile * TILE
    block = first >> log_block
    turn = block // ranks
    place = (turn << log_block) + first - (block << log_block)
    # Beyond the end, places pass 31 bits.
    return block - turn * ranks, _tile_at(first, TILE), _tile_at(place, TILE)


@triton.jit
def _tile_at(first, TILE: tl.constexpr):
    return tl.multiple_of(first.to(tl.int64), TILE)


@triton.jit
def _enter_tile(
    memory, gradient, scale, scratch, message, first, place, length, size, others,
    WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LOG_GROUP: tl.constexpr,
):  # fmt: skip
    """Return by how much the magnitude of a tile fell. It travels if it is of ``others``."""
    at = first + tl.arange(0, TILE)
    addend = load_inside(gradient, at, size, WHOLE).to(tl.float32)
    x = load_inside(memory, at, size, WHOLE) + addend * tl.full([TILE], scale, tl.float32)
    rest = x
    if others:
        rest = _write(x, message, place, length, TILE, BITS, GROUP, LOG_GROUP)
    return _keep(x, rest, scratch, at, size, WHOLE, TILE)


@triton.jit
def _keep(before, after, x, at, size, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Store a tile, and return by how much the sum of its magnitudes is smaller (float64)."""
    fell = tl.abs(before) - tl.abs(after)
    if WHOLE:
        tl.store(x + at, after)
    else:
        tl.store(x + at, after, mask=at < size)
        fell = tl.where(at < size, fell, 0.0)
    return tl.sum(tl.sum(tl.reshape(fell, [TILE // 64, 64]), axis=1).to(tl.float64), axis=0)


@triton.jit(do_not_specialize=["rank"])
def _enter(
    memory, gradient, scale, scratch, messages, stride, parts, rank, size, ranks, log_block,
    TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, LOG_GROUP: tl.constexpr,
):  # fmt: skip
    owner, first, place = _owned(tl.program_id(0), ranks, log_block, TILE)
    message = messages + owner.to(tl.int64) * stride
    length = _length(owner, size, ranks, log_block)
    others = owner != rank
    if first + TILE <= size:
        part = _enter_tile(
            memory, gradient, scale, scratch, message, first, place, length, size, others,
            True, TILE, BITS, GROUP, LOG_GROUP,
        )  # fmt: skip
    else:
        part = _enter_tile(
            memory, gradient, scale, scratch, message, first, place, length, size, others,
            False, TILE, BITS, GROUP, LOG_GROUP,
        )  # fmt: skip
    _add_up(parts, part)


@triton.jit(do_not_specialize=["rank", "begins", "detail", "up_begins", "up_detail"])
def _begin_collect(
    came, stride, finite, fault, message, parts, rank, size, ranks, log_block,
    up_begins, up_detail, begins, detail,
    ADDS: tl.constexpr, TAKES: tl.constexpr, UP_BITS: tl.constexpr, UP_GROUP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    if ADDS:
        bad, wrong = _check(
            came,
            stride,
            rank,
            size,
            ranks,
            log_block,
            up_begins,
            up_detail,
            True,
            UP_BITS,
            UP_GROUP,
        )
        tl.store(finite, bad == 0)
        tl.store(fault, wrong != 0)
    else:
        bad = (tl.load(finite) == 0).to(tl.int32)
    if TAKES:
        region = tl.zeros([_ROWS, 1], tl.int32) + rank
        _begin_rows(
            message, 0, 0, 1, region, bad, size, ranks, log_block, begins, detail, BITS, GROUP
        )
    _begin_parts(parts)


@triton.jit
def _collect_tile(
    x, came, stride, message, rank, ranks, first, place, length, size,
    WHOLE: tl.constexpr, ADDS: tl.constexpr, TAKES: tl.constexpr, TILE: tl.constexpr,
    UP_BITS: tl.constexpr, UP_GROUP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, LOG_GROUP: tl.constexpr,
):  # fmt: skip
    at = first + tl.arange(0, TILE)
    before = load_inside(x, at, size, WHOLE)
    after = before
    if ADDS:
        for other in range(ranks - 1):
            source = other + (other >= rank).to(tl.int64)
            after += _read(came + source * stride, place, length, TILE, UP_BITS, UP_GROUP)
    if TAKES:
        if not WHOLE:
            after = tl.where(at < size, after, 0.0)
        after = _write(after, message, place, length, TILE, BITS, GROUP, LOG_GROUP)
    return _keep(before, after, x, at, size, WHOLE, TILE)


@triton.jit(do_not_specialize=["rank"])
def _collect(
    x, came, stride, message, parts, rank, size, ranks, log_block,
    ADDS: tl.constexpr, TAKES: tl.constexpr, TILE: tl.constexpr,
    UP_BITS: tl.constexpr, UP_GROUP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, LOG_GROUP: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * TILE
    turn = place >> log_block
    first = _tile_at(place + ((turn * (ranks - 1) + rank) << log_block), TILE)
    place = _tile_at(place, TILE)
    length = _length(rank, size, ranks, log_block)
    if first + TILE <= size:
        part = _collect_tile(
            x, came, stride, message, rank, ranks, first, place, length, size,
            True, ADDS, TAKES, TILE, UP_BITS, UP_GROUP, BITS, GROUP, LOG_GROUP,
        )  # fmt: skip
    else:
        part = _collect_tile(
            x, came, stride, message, rank, ranks, first, place, length, size,
            False, ADDS, TAKES, TILE, UP_BITS, UP_GROUP, BITS, GROUP, LOG_GROUP,
        )  # fmt: skip
    _add_up(parts, part)


@triton.jit(do_not_specialize=["begins", "detail"])
def _begin_deliver(
    came, stride, entries, finite, fault, size, ranks, log_block, begins, detail,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    bad, wrong = _check(
        came, stride, 0, size, ranks, log_block, begins, detail, False, BITS, GROUP
    )  # fmt: skip
    tl.store(entries, tl.cast(size, tl.int64))
    tl.store(finite, bad == 0)
    tl.store(fault, wrong != 0)


@triton.jit
def _deliver_tile(
    came, divisor, out, finite, first, place, length, size, INFINITE: tl.constexpr,
    WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    at = first + tl.arange(0, TILE)
    values = _read(came, place, length, TILE, BITS, GROUP)
    values = tl.div_rn(values, tl.full([TILE], divisor, tl.float32)).to(out.dtype.element_ty)
    largest = magnitude_bits(values)
    if WHOLE:
        tl.store(out + at, values)
    else:
        tl.store(out + at, values, mask=at < size)
        largest = tl.where(at < size, largest, 0)
    tl.store(finite, False, mask=tl.max(largest, axis=0) >= INFINITE)


@triton.jit
def _deliver(
    came, stride, divisor, out, finite, size, ranks, log_block,
    INFINITE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    owner, first, place = _owned(tl.program_id(0), ranks, log_block, TILE)
    message = came + owner.to(tl.int64) * stride
    length = _length(owner, size, ranks, log_block)
    if first + TILE <= size:
        _deliver_tile(
            message, divisor, out, finite, first, place, length, size, INFINITE, True,
            TILE, BITS, GROUP,
        )  # fmt: skip
    else:
        _deliver_tile(
            message, divisor, out, finite, first, place, length, size, INFINITE, False,
            TILE, BITS, GROUP,
        )  # fmt: skip


class Added(NamedTuple):
    """What `add` tells: whether all that came is finite, whether a message was bad (bool), and by
    how much the magnitude of the region fell (float64), in tensors ``[]``.
    """

    finite: Tensor
    fault: Tensor
    magnitude: Tensor


def enter(addition: Addition, up: Phase, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `sparcel.kernels.enter` does: the messages, how many entries, the magnitude."""
    scratch, ranks = addition.scratch, up.regions.ranks
    tile, programs = _tiles(up, up.regions.size)
    messages = scratch.new_empty(ranks, _row_bytes(up), dtype=torch.uint8)
    sent = scratch.new_empty((), dtype=torch.int64)
    parts = _parts(scratch, programs)
    launch(
        _begin_enter, 1, messages, messages.stride(0), parts, sent, rank, *_layout(up),
        *_kind(up), **_coding(up),
    )  # fmt: skip
    launch(
        _enter, programs, addition.memory, addition.gradient.detach(), addition.scale, scratch,
        messages, messages.stride(0), parts, rank, *_layout(up),
        TILE=tile, LOG_GROUP=_log_group(up), **_coding(up), num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return messages, sent, parts[0]


def collect(
    x: Tensor, arrived: Tensor, up: Phase, down: Phase, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `sparcel.kernels.collect` does: the message, the magnitude, and the fault."""
    flags = x.new_empty(2, dtype=torch.bool)
    message, magnitude = _collected(x, arrived, up, down, rank, flags[0], flags[1])
    return message, magnitude, flags[1]


def add(x: Tensor, arrived: Tensor, up: Phase, rank: int) -> Added:
    """Add what arrived to the own region of ``x``."""
    flags = x.new_empty(2, dtype=torch.bool)
    _, magnitude = _collected(x, arrived, up, None, rank, flags[0], flags[1])
    return Added(flags[0], flags[1], magnitude)


def take_own(x: Tensor, down: Phase, rank: int, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Take out of the own region of ``x`` what all ranks get.

    Return the message and by how much the magnitude fell. The message says that it is not finite
    if ``finite``, a bool ``[]``, or the region is not.
    """
    return _collected(x, x, None, down, rank, finite, finite)


def _collected(
    x: Tensor,
    arrived: Tensor,
    up: Phase | None,
    down: Phase | None,
    rank: int,
    finite: Tensor,
    fault: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add what came ``up``, if anything, and take out what goes ``down``, if anything."""
    came, goes = up or down, down or up
    assert came is not None
    assert goes is not None
    tile, programs = _tiles(goes, goes.regions.length(rank))
    message = x.new_empty(_row_bytes(goes) if down else 0, dtype=torch.uint8)
    parts = _parts(x, programs)
    constants = {
        "ADDS": up is not None,
        "TAKES": down is not None,
        "UP_BITS": came.bits,
        "UP_GROUP": came.group,
        **_coding(goes),
    }
    stride, layout = arrived.stride(0), _layout(goes)
    launch(
        _begin_collect, 1, arrived, stride, finite, fault, message, parts, rank, *layout,
        *_kind(came), *_kind(goes), **constants,
    )  # fmt: skip
    launch(
        _collect, programs, x, arrived, stride, message, parts, rank, *layout,
        TILE=tile, LOG_GROUP=_log_group(goes), **constants, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return message, parts[0]


def deliver(
    returned: Tensor, down: Phase, divisor: float, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `sparcel.kernels.deliver` does: the entries, whether all is finite, the fault."""
    entries = out.new_empty((), dtype=torch.int64)
    flags = out.new_empty(2, dtype=torch.bool)
    tile, programs = _tiles(down, out.numel())
    stride, layout = returned.stride(0), _layout(down)
    launch(
        _begin_deliver, 1, returned, stride, entries, flags[0], flags[1], *layout,
        *_kind(down), **_coding(down),
    )  # fmt: skip
    launch(
        _deliver, programs, returned, stride, divisor, out, flags[0], *layout,
        INFINITE=bits_of(math.inf, out.dtype), TILE=tile, **_coding(down), num_warps=_WARPS,
    )  # fmt: skip
    return entries, flags[0], flags[1]


def _tiles(phase: Phase, size: int) -> tuple[int, int]:
    """Return how many coordinates a program takes, and how many programs take ``size``."""
    tile = min(phase.regions.block, _TILE)
    return tile, triton.cdiv(size, tile)


def _row_bytes(phase: Phase) -> int:
    """Return how many bytes lie between the messages of two ranks."""
    return -(-max(phase.bounds) // _ROW) * _ROW


def _parts(x: Tensor, programs: int) -> Tensor:
    """Return memory for what `_add_up` adds up."""
    return x.new_empty(_FIRST_PART.value + programs, dtype=torch.float64)


def _layout(phase: Phase) -> tuple[int, int, int]:
    regions = phase.regions
    return regions.size, regions.ranks, regions.block.bit_length() - 1


def _kind(phase: Phase) -> tuple[int, int]:
    """Return the words of headers that do not depend on the region."""
    begins, detail = struct.unpack_from("<qq", phase.headers[0])
    return begins, detail


def _coding(phase: Phase) -> dict[str, Any]:
    return {"BITS": phase.bits, "GROUP": phase.group}


def _log_group(phase: Phase) -> int:
    return phase.group.bit_length() - 1
