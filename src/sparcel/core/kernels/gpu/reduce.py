"""Merging and filtering of sparse vectors, and writing of them into dense ones, on a GPU.

Nothing is sorted: an entry finds its place in other streams by a binary search.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core import device
from sparcel.core.kernels.definitions import reduce as definitions
from sparcel.core.kernels.definitions.select import index_dtype
from sparcel.core.kernels.gpu._base import (
    BLOCK,
    GROUP,
    add_span,
    before_span,
    groups_length,
    launch,
    lower_bound,
    number_bits,
    number_of,
    programs_for,
    widened,
)
from sparcel.core.ops import Op
from sparcel.errors import InputError

_COLUMNS = 128  # of rows that a program reads at once


def merge(streams: Sequence[tuple[Tensor, Tensor]], op: Op) -> tuple[Tensor, Tensor]:
    if op.name is None or not streams:
        return definitions.merge(streams, op)
    for one in streams:
        _check_rows(*one)
    if len({(indices.dtype, values.dtype) for indices, values in streams}) > 1:
        raise InputError("all streams must have the same dtypes")
    indices = torch.cat([indices for indices, _ in streams])
    values = torch.cat([values.detach() for _, values in streams])
    if sum(one.numel() > 0 for one, _ in streams) <= 1:
        return indices, values
    if values.numel() == 0:  # rows without columns
        alone, _ = merge([(indices, indices) for indices, _ in streams], op)
        return alone, values.new_empty(alone.numel(), 0)
    total, columns = indices.numel(), min(triton.next_power_of_2(_width(values)), _COLUMNS)
    positions = BLOCK // columns
    programs = triton.cdiv(total, positions)
    # The count of runs, and those of groups of programs.
    work = indices.new_empty(1 + groups_length(programs), dtype=torch.int64)
    order, heads = _ranked(indices, [indices.numel() for indices, _ in streams], work)
    counts = heads.new_empty(programs, dtype=torch.int32)
    launch(_count, programs, heads, counts, work, total, BLOCK=positions, GROUP=GROUP)
    merged, reduced = torch.empty_like(indices), torch.empty_like(values)
    launch(
        _reduce, programs, indices, values, order, heads, counts, work, merged, reduced, total,
        len(streams), _width(values),
        OP=op.name, POSITIONS=positions, COLUMNS=columns, GROUP=GROUP,
    )  # fmt: skip
    length = int(device.read(work[0]))
    return merged[:length], reduced[:length]


def scatter_reduce(dense: Tensor, indices: Tensor, values: Tensor, op: Op) -> None:
    if op.name is None:
        device.settle()  # an index out of bounds, from a corrupt message, would end all of CUDA
        definitions.scatter_reduce(dense, indices, values, op)
    else:
        _scattered(dense, indices, values, op.name)


def scatter(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    _scattered(dense, indices, values, "write")


def expand(dense: Tensor, indices: Tensor, values: Tensor, fill: float = 0) -> None:
    dense.detach().fill_(fill)
    scatter(dense, indices, values)


def add_saturated(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    _scattered(dense, indices, values, "add_saturated")


def average(total: Tensor, divisor: float, out: Tensor | None = None) -> Tensor:
    if total.dtype not in (torch.float32, torch.float64):
        return definitions.average(total, divisor, out)
    given = total.detach()
    out = torch.empty_like(given) if out is None else out
    bits = number_bits(divisor)
    launch(_divide, programs_for(given.numel()), given, out, bits, given.numel(), BLOCK=BLOCK)
    return out


def indices_fault(indices: Tensor, size: int) -> Tensor:
    """Return whether an index is not in [0, size) or not greater than the one before it.

    It is bool, without dimensions, and stays on the device: nobody waits for it.
    """
    fault = indices.new_zeros((), dtype=torch.int8)
    count = indices.numel()
    launch(_check, programs_for(count), indices, fault, count, size, BLOCK=BLOCK)
    return fault.view(torch.bool)


@triton.jit(do_not_specialize=["total", "streams", "steps", "length"])
def _rank(indices, bounds, order, heads, work, total, streams, steps, length, BLOCK: tl.constexpr):
    """Write each entry's number to its place in the merged order, and zeros to ``work``.

    Entries of one index are in the order of their streams; the first is the head of the run.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(work + number, tl.zeros([BLOCK], tl.int64), mask=number < length)
    there = number < total
    index = tl.load(indices + number, mask=there, other=0)
    rank = tl.zeros([BLOCK], dtype=tl.int64)
    head = there
    for stream in range(streams):
        start, stop = tl.load(bounds + stream), tl.load(bounds + stream + 1)
        own = (start <= number) & (number < stop)
        low, high = tl.where(own, number, start), tl.where(own, number, stop)
        place = lower_bound(indices, low, high, index, steps)
        earlier = there & (stop <= number) & (place < stop)
        equal = earlier & (tl.load(indices + place, mask=earlier, other=0) == index)
        rank += place - start + equal.to(tl.int64)
        head = head & (equal == 0)
    tl.store(order + rank, number.to(order.dtype.element_ty), mask=there)
    tl.store(heads + rank, head.to(tl.int8), mask=there)


@triton.jit(do_not_specialize=["total"])
def _count(heads, counts, work, total, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    head = tl.load(heads + place, mask=place < total, other=0) != 0
    add_span(work + 1, 0, work, counts, program, tl.sum(head.to(tl.int32), axis=0), GROUP)


@triton.jit(do_not_specialize=["total", "streams", "width"])
def _reduce(
    indices, values, order, heads, counts, work, union, reduced, total, streams, width,
    OP: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Reduce runs of equal indices.

    Indices of a corrupt message leave gaps in the order. What is read there is no address.
    """
    program = tl.program_id(0).to(tl.int64)
    place = program * POSITIONS + tl.arange(0, POSITIONS)
    head = tl.load(heads + place, mask=place < total, other=0) != 0
    slot = before_span(work + 1, 0, counts, program, GROUP)
    slot += tl.cumsum(head.to(tl.int32), axis=0) - 1
    length = head.to(tl.int32)
    for step in range(1, streams):
        after = (length == step) & (place + step < total)
        length += (after & (tl.load(heads + place + step, mask=after, other=1) == 0)).to(tl.int32)
    first = tl.load(order + place, mask=head, other=0).to(tl.int64)
    sound = head & (first >= 0) & (first < total)
    tl.store(union + slot, tl.load(indices + first, mask=sound, other=0), mask=head)
    for start in range(0, width, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        there = sound[:, None] & (column < width)
        value = tl.load(values + first[:, None] * width + column, mask=there, other=0)
        result = widened(value)
        for step in range(1, tl.max(length, axis=0)):
            number = tl.load(order + place + step, mask=step < length, other=0).to(tl.int64)
            sure = (step < length) & (number >= 0) & (number < total)
            more = sure[:, None] & (column < width)
            value = tl.load(values + number[:, None] * width + column, mask=more, other=0)
            result = tl.where(more, _combined(result, widened(value), OP), result)
        element = slot[:, None] * width + column
        kept = head[:, None] & (column < width)
        tl.store(reduced + element, result.to(reduced.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["elements", "size"])
def _scatter(
    dense, indices, values, elements, size, width,
    OP: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = element < elements
    row, column = element // width, element % width
    index = tl.load(indices + row, mask=there, other=0).to(tl.int64)
    there = there & (index >= 0) & (index < size)
    place = dense + index * width + column
    value = tl.load(values + element, mask=there, other=0)
    if OP == "add_saturated":
        value += tl.load(place, mask=there, other=0)
        most = tl.full([BLOCK], MOST, dtype=value.dtype)
        value = tl.where(value > most, most, tl.where(value < -most, -most, value))
    elif OP != "write":
        value = _combined(widened(tl.load(place, mask=there, other=0)), widened(value), OP)
    tl.store(place, value.to(dense.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["divisor", "count"])
def _divide(total, out, divisor, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(total + place, mask=place < count, other=0)
    by = tl.zeros_like(value) + number_of(divisor, value.dtype)
    if value.dtype == tl.float32:
        value = tl.div_rn(value, by)
    else:  # of which Triton has no other quotient
        value = value / by
    tl.store(out + place, value, mask=place < count)


@triton.jit(do_not_specialize=["count", "size"])
def _check(indices, fault, count, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    index = tl.load(indices + place, mask=there, other=0)
    before = tl.load(indices + place - 1, mask=there & (place > 0), other=-1)
    wrong = there & ((index < 0) | (index >= size) | (index <= before))
    tl.store(fault, 1, mask=tl.max(wrong.to(tl.int32), axis=0) > 0)


@triton.jit
def _combined(first, second, OP: tl.constexpr):
    if OP == "sum":
        result = first + second
    elif OP == "product":
        result = first * second
    elif OP == "min":
        # Of zeros the first one stays, as on the CPU, whatever their signs are.
        result = tl.where((second < first) | (second != second), second, first)
    else:
        result = tl.where((second > first) | (second != second), second, first)
    return result


def _ranked(indices: Tensor, lengths: Sequence[int], work: Tensor) -> tuple[Tensor, Tensor]:
    """Return the merged order of streams that lie one after another.

    Parameters
    ----------
    lengths
        How many of the indices each stream has.
    work
        int64; it is filled with zeros. It may be as long as a block of indices, or as all of them.

    Returns
    -------
    order, heads
        The number of the entry at each rank, and, as int8, whether it is the first of its index.
    """
    total = indices.numel()
    bounds = device.put([0, *accumulate(lengths)], indices.device, torch.int64)
    order = indices.new_empty(total, dtype=index_dtype(total))
    heads = indices.new_empty(total, dtype=torch.int8)
    launch(
        _rank, programs_for(total), indices, bounds, order, heads, work, total, len(lengths),
        max(lengths).bit_length(), work.numel(), BLOCK=BLOCK,
    )  # fmt: skip
    return order, heads


def _scattered(dense: Tensor, indices: Tensor, values: Tensor, how: str) -> None:
    """Combine values with those of ``dense`` in place, or overwrite these."""
    _check_rows(indices, values)
    if values.shape[1:] != dense.shape[1:]:
        raise InputError("rows must have the width of dense")
    converted = values.detach().to(dense.dtype)
    most = torch.finfo(dense.dtype).max if how == "add_saturated" else 0
    launch(
        _scatter, programs_for(converted.numel()), dense, indices, converted, converted.numel(),
        dense.shape[0], _width(dense), OP=how, MOST=most, BLOCK=BLOCK,
    )  # fmt: skip


def within(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    return _filtered(indices, values.detach(), others, found=True)


def without(
    indices: Tensor, values: Tensor, others: Tensor, left: int | None = None
) -> tuple[Tensor, Tensor]:
    return _filtered(indices, values.detach(), others, found=False, count=left)


@triton.jit(do_not_specialize=["size", "length", "steps"])
def _keep(indices, others, kept, size, length, steps, FOUND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    index = tl.load(indices + place, mask=there, other=0)
    low = tl.zeros([BLOCK], dtype=tl.int64)
    other = lower_bound(others, low, low + length, index, steps)
    inside = there & (other < length)
    found = inside & (tl.load(others + other, mask=inside, other=0) == index)
    tl.store(kept + place, (found == FOUND).to(tl.int8), mask=there)


@triton.jit(do_not_specialize=["size"])
def _count_kept(kept, counts, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    passed = tl.load(kept + place, mask=place < size, other=0) != 0
    tl.store(counts + program, tl.sum(passed.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["size"])
def _list_kept(kept, before, places, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    passed = tl.load(kept + place, mask=place < size, other=0) != 0
    start = tl.load(before + program - 1, mask=program > 0, other=0)
    slot = start + tl.cumsum(passed.to(tl.int32), axis=0) - 1
    tl.store(places + slot, place.to(places.dtype.element_ty), mask=passed)


def _filtered(
    indices: Tensor, values: Tensor, others: Tensor, found: bool, count: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the entries whose indices are among ``others``, or those that are not.

    The host waits for their number if ``count`` is not it.
    """
    _check_rows(indices, values)
    if indices.dtype != others.dtype:
        raise InputError("both lists of indices must have one dtype")
    size, length, programs = indices.numel(), others.numel(), programs_for(indices.numel())
    if size == 0:
        return indices.clone(), values.clone()
    kept = indices.new_empty(size, dtype=torch.int8)
    counts = indices.new_empty(programs, dtype=torch.int32)
    places = indices.new_empty(size, dtype=index_dtype(size))
    launch(
        _keep, programs, indices, others, kept, size, length, length.bit_length(),
        FOUND=found, BLOCK=BLOCK,
    )  # fmt: skip
    launch(_count_kept, programs, kept, counts, size, BLOCK=BLOCK)
    before = counts.cumsum(0)
    launch(_list_kept, programs, kept, before, places, size, BLOCK=BLOCK)
    places = places[: int(device.read(before[-1:])) if count is None else count]
    return indices.index_select(0, places), values.index_select(0, places)


def _check_rows(indices: Tensor, values: Tensor) -> None:
    """Raise `InputError` unless there is a value or a row for each index."""
    if values.shape[:1] != indices.shape:
        raise InputError("each index needs its value or row")


def _width(values: Tensor) -> int:
    return values.shape[1] if values.ndim == 2 else 1
