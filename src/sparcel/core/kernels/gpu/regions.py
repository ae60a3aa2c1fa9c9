"""The passes of the two exchanges by regions, on a GPU, and those of all coordinates.

Each pass over regions of which everything travels takes two launches. The first, of one program,
begins the outgoing messages and checks the headers of those that came; the second is over the
vector: a tile is read once, and rounded where it is. The passes that select are in `_selected` and
`_arrived`. Other formats than few bits, and momentum, are left to the definition.

Messages are rows of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core.kernels.definitions import regions
from sparcel.core.kernels.definitions.regions import Collected, Delivered, Entered
from sparcel.core.kernels.definitions.select import Addition
from sparcel.core.kernels.gpu import _arrived, _selected
from sparcel.core.kernels.gpu._arrived import Added
from sparcel.core.kernels.gpu._base import (
    is_infinite,
    launch,
    load_inside,
    magnitude_bits,
    store_inside,
)
from sparcel.core.kernels.gpu._message import (
    TILE,
    WARPS,
    add_last,
    begin_rows,
    check,
    kind_of,
    layout_of,
    length_of,
    read_tile,
    rows_from,
    skipped,
    write_tile,
)
from sparcel.core.kernels.regions import Leg, row_bytes


def enter(addition: Addition, up: Leg, rank: int, step: int) -> Entered:
    wide = addition.gradient.dtype == torch.float64
    if not up.group or wide or addition.entering is not None or addition.clear:
        return regions.enter(addition, up, rank, step)
    if up.dense:
        return _enter_whole(addition, up, rank)
    return _selected.enter(addition, up, rank, step)


def collect(
    addition: Addition,
    arrived: Sequence[Tensor] | Tensor,
    up: Leg,
    down: Leg,
    rank: int,
    step: int,
) -> Collected:
    if not (up.group and down.group) or addition.entering is not None:
        return regions.collect(addition, arrived, up, down, rank, step)
    x, rows = addition.scratch, _rows(arrived)
    if up.dense and down.dense:
        fault = x.new_empty((), dtype=torch.bool)
        return Collected(*_collect_whole(x, rows, up, down, rank, fault, x), fault)
    finite, fault, fell = (_add_whole if up.dense else _arrived.add)(x, rows, up, rank)
    if down.dense:
        made = _collect_whole(x, None, down, down, rank, finite, fell)
    else:
        made = _selected.take_own(x, down, rank, step, finite, fell)
    return Collected(*made, fault)


def deliver(
    out: Tensor, returned: Sequence[Tensor] | Tensor, down: Leg, divisor: float
) -> Delivered:
    if not down.group or out.dtype == torch.float64:
        return regions.deliver(out, returned, down, divisor)
    passes = _deliver_whole if down.dense else _arrived.deliver
    return passes(_rows(returned), down, divisor, out)


def _rows(messages: Sequence[Tensor] | Tensor) -> Tensor:
    """Return messages in one tensor, as they come where the ranks are on GPUs."""
    return messages if isinstance(messages, Tensor) else torch.stack([*messages])


@triton.jit
def _begin_parts(parts, sum):
    """Write what comes before the programs' parts: a sum, and how many programs are done."""
    tl.store(parts, sum)
    tl.store(parts + 1, 0.0)


@triton.jit
def _add_up(parts, part):
    """Add the parts of all programs to the sum with which they begin."""
    add_last(part, parts + 2, parts + 1, parts)


@triton.jit(do_not_specialize=["rank", "begins", "detail"])
def _begin_enter(
    messages, stride, parts, sent, rank, size, ranks, block_bits, begins, detail,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    for first in range(0, ranks, 64):
        begin_rows(
            messages, stride, first, ranks, rows_from(first), 0, size, ranks, block_bits,
            begins, detail, BITS, GROUP,
        )  # fmt: skip
    tl.store(sent, size - length_of(size, ranks, block_bits, rank).to(tl.int64))
    _begin_parts(parts, 0.0)


@triton.jit
def _owned(tile, ranks, block_bits, TILE: tl.constexpr):
    """Return the owner of a tile of the vector, where it begins there, and where in the region."""
    first = tile * TILE
    block = first >> block_bits
    turn = block // ranks
    place = (turn << block_bits) + first - (block << block_bits)
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
    store_inside(x, at, after, size, WHOLE)
    if not WHOLE:
        fell = tl.where(at < size, fell, 0.0)
    return tl.sum(tl.sum(tl.reshape(fell, [TILE // 64, 64]), axis=1).to(tl.float64), axis=0)


@triton.jit(do_not_specialize=["rank"])
def _enter(
    memory, gradient, scale, scratch, messages, stride, parts, rank, size, ranks, block_bits,
    TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, LOG_GROUP: tl.constexpr,
):  # fmt: skip
    owner, first, place = _owned(tl.program_id(0), ranks, block_bits, TILE)
    message = messages + owner.to(tl.int64) * stride
    length = length_of(size, ranks, block_bits, owner).to(tl.int64)
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


@triton.jit(do_not_specialize=["rank", "up_begins", "up_detail", "begins", "detail"])
def _begin_collect(
    came, stride, flag, fell, message, parts, rank, size, ranks, block_bits,
    up_begins, up_detail, begins, detail, ADDS: tl.constexpr,
    UP_BITS: tl.constexpr, UP_GROUP: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    if ADDS:
        bad, wrong = check(
            came, stride, rank, size, ranks, block_bits, up_begins, up_detail, True,
            UP_BITS, UP_GROUP,
        )  # fmt: skip
        tl.store(flag, wrong != 0)
        _begin_parts(parts, 0.0)
    else:
        bad = (tl.load(flag) == 0).to(tl.int32)
        _begin_parts(parts, tl.load(fell))
    region = tl.zeros_like(rows_from(0)) + rank
    begin_rows(message, 0, 0, 1, region, bad, size, ranks, block_bits, begins, detail, BITS, GROUP)


@triton.jit(do_not_specialize=["rank", "begins", "detail"])
def _begin_reading(
    came, stride, finite, fault, told, rank, size, ranks, block_bits, begins, detail,
    OWN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Say what is wrong with messages. Those about the ``OWN`` region will be added up."""
    bad, wrong = check(
        came, stride, rank, size, ranks, block_bits, begins, detail, OWN, BITS, GROUP
    )  # fmt: skip
    tl.store(finite, bad == 0)
    tl.store(fault, wrong != 0)
    if OWN:
        _begin_parts(told, 0.0)
    else:
        tl.store(told, tl.cast(size, tl.int64))


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
    if not WHOLE:
        after = tl.where(at < size, after, 0.0)
    if TAKES:
        after = write_tile(after, message, place, length, TILE, BITS, GROUP, LOG_GROUP)
    return _keep(before, after, x, at, size, WHOLE, TILE)


@triton.jit(do_not_specialize=["rank"])
def _collect(
    x, came, stride, message, parts, rank, size, ranks, block_bits,
    ADDS: tl.constexpr, TAKES: tl.constexpr, TILE: tl.constexpr,
    UP_BITS: tl.constexpr, UP_GROUP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, LOG_GROUP: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * TILE
    first = _tile_at(place + skipped(place, ranks, block_bits, rank), TILE)
    place = _tile_at(place, TILE)
    length = length_of(size, ranks, block_bits, rank).to(tl.int64)
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


@triton.jit
def _deliver_tile(
    came, divisor, out, finite, first, place, length, size,
    WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    at = first + tl.arange(0, TILE)
    values = read_tile(came, place, length, TILE, BITS, GROUP)
    values = tl.div_rn(values, tl.full([TILE], divisor, tl.float32)).to(out.dtype.element_ty)
    largest = magnitude_bits(values.to(tl.float32))
    store_inside(out, at, values, size, WHOLE)
    if not WHOLE:
        largest = tl.where(at < size, largest, 0)
    tl.store(finite, False, mask=is_infinite(tl.max(largest, axis=0)))


@triton.jit
def _deliver(
    came, stride, divisor, out, finite, size, ranks, block_bits,
    TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    owner, first, place = _owned(tl.program_id(0), ranks, block_bits, TILE)
    message = came + owner.to(tl.int64) * stride
    length = length_of(size, ranks, block_bits, owner).to(tl.int64)
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


def _enter_whole(addition: Addition, up: Leg, rank: int) -> Entered:
    scratch, layout, coding = addition.scratch, layout_of(up), _coding(up)
    tile, programs, parts = _tiles(up, addition.scratch)
    messages = scratch.new_empty(up.regions.ranks, row_bytes(up.bounds), dtype=torch.uint8)
    sent, stride = scratch.new_empty((), dtype=torch.int64), messages.stride(0)
    launch(_begin_enter, 1, messages, stride, parts, sent, rank, *layout, *kind_of(up), **coding)
    launch(
        _enter, programs, addition.memory, addition.gradient.detach(), addition.scale, scratch,
        messages, stride, parts, rank, *layout, TILE=tile, LOG_GROUP=_log_group(up), **coding,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return Entered(messages, sent, parts[0])


def _add_whole(x: Tensor, arrived: Tensor, up: Leg, rank: int) -> Added:
    """Add what others sent to the own region of ``x``, of which a selection is to travel."""
    finite, fault = x.new_empty(2, dtype=torch.bool)
    tile, programs, parts = _tiles(up, x, rank)
    stride, layout = arrived.stride(0), layout_of(up)
    launch(
        _begin_reading, 1, arrived, stride, finite, fault, parts, rank, *layout, *kind_of(up),
        OWN=True, **_coding(up),
    )  # fmt: skip
    launch(
        _collect, programs, x, arrived, stride, arrived, parts, rank, *layout,
        ADDS=True, TAKES=False, TILE=tile, UP_BITS=up.bits, UP_GROUP=up.group,
        LOG_GROUP=_log_group(up), **_coding(up), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return Added(finite, fault, parts[0])


def _collect_whole(
    x: Tensor, arrived: Tensor | None, up: Leg, down: Leg, rank: int, flag: Tensor, fell: Tensor
) -> tuple[Tensor, Tensor]:
    """Take out of the own region of ``x`` what all get, after what ``arrived`` is added.

    The ``flag`` (bool ``[]``) will tell whether a message was bad. Where nothing arrives because
    all was added before, it tells whether that is finite, and ``fell`` by how much the magnitude of
    the region fell (float64 ``[]``). Return the message, and by how much it fell in all.
    """
    tile, programs, parts = _tiles(down, x, rank)
    message = x.new_empty(row_bytes(down.bounds), dtype=torch.uint8)
    came = message if arrived is None else arrived
    stride, layout = came.stride(0), layout_of(down)
    coding = {"UP_BITS": up.bits, "UP_GROUP": up.group, **_coding(down)}
    constants = {"ADDS": arrived is not None, **coding}
    launch(
        _begin_collect, 1, came, stride, flag, fell, message, parts, rank, *layout,
        *kind_of(up), *kind_of(down), **constants,
    )  # fmt: skip
    launch(
        _collect, programs, x, came, stride, message, parts, rank, *layout,
        TAKES=True, TILE=tile, LOG_GROUP=_log_group(down), **constants,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return message, parts[0]


def _deliver_whole(returned: Tensor, down: Leg, divisor: float, out: Tensor) -> Delivered:
    entries = out.new_empty((), dtype=torch.int64)
    finite, fault = out.new_empty(2, dtype=torch.bool)
    tile = min(down.regions.block, TILE)
    stride, layout, coding = returned.stride(0), layout_of(down), _coding(down)
    launch(
        _begin_reading, 1, returned, stride, finite, fault, entries, 0, *layout, *kind_of(down),
        OWN=False, **coding,
    )  # fmt: skip
    launch(
        _deliver, triton.cdiv(out.numel(), tile), returned, stride, divisor, out, finite, *layout,
        TILE=tile, **coding, num_warps=WARPS,
    )  # fmt: skip
    return Delivered(entries, finite, fault)


def _tiles(leg: Leg, x: Tensor, owner: int | None = None) -> tuple[int, int, Tensor]:
    """Return how many coordinates a program takes, and how many programs take a region, or all.

    And memory for what `_add_up` adds up.
    """
    tile = min(leg.regions.block, TILE)
    programs = triton.cdiv(x.numel() if owner is None else leg.regions.length(owner), tile)
    return tile, programs, x.new_empty(2 + programs, dtype=torch.float64)


def _coding(leg: Leg) -> dict[str, int]:
    return {"BITS": leg.bits, "GROUP": leg.group}


def _log_group(leg: Leg) -> int:
    return leg.group.bit_length() - 1
