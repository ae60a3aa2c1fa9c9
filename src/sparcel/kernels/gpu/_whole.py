"""Passes over regions of which everything travels: a tile is read once, and rounded where it is.

Each pass takes two launches. The first, of one program, begins the outgoing messages and checks the
headers of those that came; the second is over the vector.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.addition import Addition
from sparcel.kernels.gpu._bits import magnitude_bits
from sparcel.kernels.gpu._compact import load_inside
from sparcel.kernels.gpu._dense import HEADERS, begin_rows, check, length_of, read_tile, write_tile
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.phase import Phase

_TILE = 2048  # the most coordinates a program; they lie in one block
_WARPS = 8  # so a lane holds 8 coordinates of a whole tile
_ROW = 16  # the rows of messages begin at multiples of it

_FIRST_PART = tl.constexpr(2)  # after the sum, and the number of programs that are done
_SUMMED = tl.constexpr(2048)  # parts at a time


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


@triton.jit(do_not_specialize=["rank", "begins", "detail"])
def _begin_enter(
    messages, stride, parts, sent, rank, size, ranks, log_block, begins, detail,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    for first in range(0, ranks, HEADERS):
        region = first + tl.arange(0, HEADERS)[:, None]
        begin_rows(
            messages, stride, first, ranks, region, 0, size, ranks, log_block, begins, detail,
            BITS, GROUP,
        )  # fmt: skip
    tl.store(sent, size - length_of(rank, size, ranks, log_block))
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
        rest = write_tile(x, message, place, length, TILE, BITS, GROUP, LOG_GROUP)
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
    length = length_of(owner, size, ranks, log_block)
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
        bad, wrong = check(
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
        region = tl.zeros([HEADERS, 1], tl.int32) + rank
        begin_rows(
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
            after += read_tile(came + source * stride, place, length, TILE, UP_BITS, UP_GROUP)
    if TAKES:
        if not WHOLE:
            after = tl.where(at < size, after, 0.0)
        after = write_tile(after, message, place, length, TILE, BITS, GROUP, LOG_GROUP)
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
    length = length_of(rank, size, ranks, log_block)
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
    bad, wrong = check(
        came, stride, 0, size, ranks, log_block, begins, detail, False, BITS, GROUP
    )  # fmt: skip
    tl.store(entries, tl.cast(size, tl.int64))
    tl.store(finite, bad == 0)
    tl.store(fault, wrong != 0)


@triton.jit
def _deliver_tile(
    came, divisor, out, finite, first, place, length, size,
    WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    at = first + tl.arange(0, TILE)
    values = read_tile(came, place, length, TILE, BITS, GROUP)
    values = tl.div_rn(values, tl.full([TILE], divisor, tl.float32)).to(out.dtype.element_ty)
    largest = magnitude_bits(values.to(tl.float32))
    if WHOLE:
        tl.store(out + at, values)
    else:
        tl.store(out + at, values, mask=at < size)
        largest = tl.where(at < size, largest, 0)
    tl.store(finite, False, mask=tl.max(largest, axis=0) >= 0x7F800000)


@triton.jit
def _deliver(
    came, stride, divisor, out, finite, size, ranks, log_block,
    TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    owner, first, place = _owned(tl.program_id(0), ranks, log_block, TILE)
    message = came + owner.to(tl.int64) * stride
    length = length_of(owner, size, ranks, log_block)
    if first + TILE <= size:
        _deliver_tile(
            message, divisor, out, finite, first, place, length, size, True,
            TILE, BITS, GROUP,
        )  # fmt: skip
    else:
        _deliver_tile(
            message, divisor, out, finite, first, place, length, size, False,
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
    scratch, layout, coding = addition.scratch, _layout(up), _coding(up)
    tile, programs = _tiles(up, scratch.numel())
    messages = scratch.new_empty(up.regions.ranks, _row_bytes(up), dtype=torch.uint8)
    sent = scratch.new_empty((), dtype=torch.int64)
    parts, stride = _parts(scratch, programs), messages.stride(0)
    launch(_begin_enter, 1, messages, stride, parts, sent, rank, *layout, *_kind(up), **coding)
    launch(
        _enter, programs, addition.memory, addition.gradient.detach(), addition.scale, scratch,
        messages, stride, parts, rank, *layout, TILE=tile, LOG_GROUP=_log_group(up), **coding,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return messages, sent, parts[0]


def collect(
    x: Tensor, arrived: Tensor, up: Phase, down: Phase, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `sparcel.kernels.collect` does: the message, the magnitude, and the fault."""
    finite, fault = x.new_empty(2, dtype=torch.bool)
    message, magnitude = _collected(x, arrived, up, down, rank, finite, fault)
    return message, magnitude, fault


def add(x: Tensor, arrived: Tensor, up: Phase, rank: int) -> Added:
    """Add what arrived to the own region of ``x``, where another phase is taken out of it."""
    finite, fault = x.new_empty(2, dtype=torch.bool)
    _, magnitude = _collected(x, arrived, up, up, rank, finite, fault, takes=False)
    return Added(finite, fault, magnitude)


def take_own(x: Tensor, down: Phase, rank: int, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Take out of the own region of ``x`` what all ranks get, after another phase was added to it.

    Return the message and by how much the magnitude fell. The message says that it is not finite
    if ``finite``, a bool ``[]``, or the region is not.
    """
    return _collected(x, x, down, down, rank, finite, finite, adds=False)


def _collected(
    x: Tensor,
    arrived: Tensor,
    up: Phase,
    down: Phase,
    rank: int,
    finite: Tensor,
    fault: Tensor,
    adds: bool = True,
    takes: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the message and the magnitude; write the flags, or read ``finite`` if nothing adds."""
    tile, programs = _tiles(down, down.regions.length(rank))
    message = x.new_empty(_row_bytes(down) if takes else 0, dtype=torch.uint8)
    parts, stride, layout = _parts(x, programs), arrived.stride(0), _layout(down)
    coding = _coding(down)
    coding.update(ADDS=adds, TAKES=takes, UP_BITS=up.bits, UP_GROUP=up.group)
    launch(
        _begin_collect, 1, arrived, stride, finite, fault, message, parts, rank, *layout,
        *_kind(up), *_kind(down), **coding,
    )  # fmt: skip
    launch(
        _collect, programs, x, arrived, stride, message, parts, rank, *layout,
        TILE=tile, LOG_GROUP=_log_group(down), **coding,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return message, parts[0]


def deliver(
    returned: Tensor, down: Phase, divisor: float, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `sparcel.kernels.deliver` does: the entries, whether all is finite, the fault."""
    entries = out.new_empty((), dtype=torch.int64)
    finite, fault = out.new_empty(2, dtype=torch.bool)
    tile, programs = _tiles(down, out.numel())
    stride, layout, coding = returned.stride(0), _layout(down), _coding(down)
    launch(
        _begin_deliver, 1, returned, stride, entries, finite, fault, *layout, *_kind(down),
        **coding,
    )  # fmt: skip
    launch(
        _deliver, programs, returned, stride, divisor, out, finite, *layout,
        TILE=tile, **coding, num_warps=_WARPS,
    )  # fmt: skip
    return entries, finite, fault


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
