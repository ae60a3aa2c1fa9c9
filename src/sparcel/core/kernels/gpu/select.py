"""Selection of the largest coordinates on a GPU, exactly and without sorting.

A sample gives a threshold that lets slightly more than k through. One pass over the vector marks
what passes, and the k largest of that are found by a radix select. If too few or too many passed,
the radix select reads the whole vector. Sums are computed in the pass that marks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core import device
from sparcel.core.kernels.definitions.select import Addition, bracket_of, index_dtype
from sparcel.core.kernels.definitions.select import magnitude_bits as magnitude_bits_of
from sparcel.core.kernels.gpu._base import bits_of, bits_width, launch, lower_bound, magnitude_bits
from sparcel.core.kernels.gpu._mark import (
    Sum,
    emit,
    mark,
    mark_largest,
    sample,
    sum_of,
    vector_alone,
)
from sparcel.core.kernels.gpu._radix import (
    ABOVE,
    BINS,
    FAULT,
    FIELD,
    PASSED,
    ROOM,
    RULE_LENGTH,
    TIED,
    TILE,
    add_counts,
    count_field,
    find_kth,
    no_counts,
    parted,
    work_length,
)

SAMPLES = 1 << 13
"""Coordinates in a sample. Vectors of up to 16 times as many are not sampled."""


class _Plan(NamedTuple):
    """How a vector is sampled.

    Attributes
    ----------
    rank
        The threshold is the magnitude of this place in the sample, from 1.
    capacity
        The most entries that may pass the threshold.
    """

    rank: int
    capacity: int

    @classmethod
    def of(cls, k: int, size: int) -> _Plan | None:
        """Return how to sample; None where it does not pay."""
        expected = SAMPLES * k / max(size, 1)
        rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
        if k == 0 or size <= 16 * SAMPLES or rank > SAMPLES // 2:
            return None
        most = rank + 4 * math.sqrt(rank) + 8  # so many of the sample might have passed as well
        return cls(rank, min(size, math.ceil(1.05 * size * most / SAMPLES) + TILE))


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found, _ = _selected(vector_alone(x), k)
    assert found is not None, "only of sums is it told whether they are finite"
    return found


def topk_chunked(x: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    if chunk >= x.numel() or k == 0:
        return topk(x, k)
    indices, values, count = _largest_of_chunks(x, k, chunk)
    taken = int(device.read(count))
    return indices[:taken], values[:taken]


def accumulate_topk(
    addition: Addition, k: int, chunk: int | None = None
) -> tuple[Tensor, Tensor, bool | Tensor]:
    scratch, sum = addition.scratch, sum_of(addition)
    if k and (chunk is None or chunk >= scratch.numel()):
        found, finite = _selected(sum, k, clear=True)
        return *(found or _nothing(scratch)), finite
    work = _work(scratch)
    mark(sum, work, marking=False)
    if k == 0 or chunk is None:
        return *_nothing(scratch), work[FAULT] == 0
    indices, values, count = _largest_of_chunks(scratch, k, chunk, clear=True)
    taken, fault = device.read(torch.cat([count, work[FAULT : FAULT + 1]])).tolist()
    return indices[:taken], values[:taken], not fault


def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    work = _work(x)
    work[ABOVE : ABOVE + 1].fill_(max(bits_of(threshold, x.dtype) - 1, 0))
    marks = mark(vector_alone(x), work)
    # How many pass decides how much memory they take.
    passed = int(device.read(work[PASSED]))
    return emit(x, marks, work, passed, index_dtype(x.numel()))


def in_bin(values: Tensor, lowest: int, width: int, most: int) -> tuple[int, int, Tensor]:
    above = magnitude_bits_of(values).long() - lowest
    inside = (above >= 0) & (above < width)
    listed = torch.where(inside, above, -1).topk(min(most, above.numel()), sorted=False).values
    counts = torch.stack([(above >= width).sum(), inside.sum()])
    larger, count, *candidates = device.read(torch.cat([counts, listed])).tolist()
    found = [one for one in candidates if one >= 0]
    return larger, count, torch.tensor(found, dtype=torch.int64, device="cpu")


def magnitude_histogram(x: Tensor, shift: int, bins: int, prefix: int | None = None) -> Tensor:
    counts = x.new_zeros(max(bins, BINS), dtype=torch.int64)
    programs, parts = parted(x.numel())
    launch(
        _histogram, programs, x, x.numel(), shift, prefix or 0, counts, bins.bit_length() - 1,
        PREFIXED=prefix is not None, PARTS=parts, TILE=TILE, FEW=bins <= BINS,
    )  # fmt: skip
    return counts[:bins]


def bracket(x: Tensor, thresholds: Tensor, k: int) -> Tensor:
    limits = magnitude_bits_of(thresholds)
    if x.element_size() == 2:  # as the kernel reads magnitudes
        limits = limits.to(torch.int32)
    counts = x.new_zeros(BINS, dtype=torch.int64)
    programs, parts = parted(x.numel())
    launch(
        _count_by_limit, programs, x, x.numel(), limits, limits.numel(), counts,
        limits.numel().bit_length(), PARTS=parts, TILE=TILE, FIELD=FIELD,
    )  # fmt: skip
    return bracket_of(counts[: limits.numel()], k)


def _work(x: Tensor, plan: _Plan | None = None) -> Tensor:
    """Return the memory of a selection. A sample will fill it with zeros, where one is planned."""
    make = x.new_empty if plan else x.new_zeros
    return make(work_length(x), dtype=torch.int64)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the selection of no entry."""
    return x.new_empty(0, dtype=index_dtype(x.numel())), x[:0]


def _selected(sum: Sum, k: int, clear: bool = False) -> tuple[tuple[Tensor, Tensor] | None, bool]:
    """Return the k largest, and whether the sum is finite; if not, the former mean nothing.

    With ``clear`` they are set to 0 where the sum is.
    """
    x = sum.scratch
    plan, marks = _Plan.of(k, x.numel()), None
    work = _work(x, plan)
    if plan:
        sample(sum, work, SAMPLES, plan.rank)
    if plan or sum.parts["ADDED"]:
        marks = mark(sum, work, marking=plan is not None)
    found, finite = _largest(x, k, work, plan, marks, clear)
    if found is None and finite:  # without a threshold nothing misleads
        found, _ = _largest(x, k, _work(x), None, None, clear)
    return found, finite


def _largest(
    x: Tensor, k: int, work: Tensor, plan: _Plan | None, marks: Tensor | None, clear: bool
) -> tuple[tuple[Tensor, Tensor] | None, bool]:
    """Return the k largest of those that passed the threshold, or of all without a plan.

    And whether the vector was finite. With ``clear`` they are set to 0 in ``x``. If too few or too
    many passed, nothing is, and None takes the place of the selection.
    """
    k, dtype, limited = min(k, x.numel()), index_dtype(x.numel()), plan is not None
    names, candidates = None, x
    if plan and marks is not None:
        names, candidates = emit(x, marks, work, plan.capacity, dtype, counted=True)
    find_kth(candidates, k, work, limited)
    marks = mark_largest(candidates, k, work, limited)
    cleared = x if clear else None
    indices, values = emit(candidates, marks, work, k, dtype, names, cleared, selected=True)
    numbers = device.read(work[: 2 * RULE_LENGTH]).tolist()
    threshold, selected = numbers[:RULE_LENGTH], numbers[RULE_LENGTH:]
    passed, finite = threshold[PASSED], not threshold[FAULT]
    enough = passed >= k or threshold[ABOVE] == 0
    if plan and not (enough and passed <= plan.capacity):
        return None, finite
    taken = selected[PASSED] + min(selected[TIED], selected[ROOM])
    return (indices[:taken], values[:taken]), finite


@triton.jit(do_not_specialize=["size", "shift", "prefix", "field"])
def _histogram(
    x, size, shift, prefix, counts, field,
    PREFIXED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    found = no_counts()
    for part in range(PARTS):
        place = (program * PARTS + part) * TILE + tl.arange(0, TILE)
        bits = magnitude_bits(tl.load(x + place, mask=place < size, other=0.0))
        counted = bits != 0
        if PREFIXED:
            counted = counted & ((bits >> (shift + field)) == prefix)
        if FEW:
            found += count_field(bits, counted, shift, field)
        else:  # entries meet rarely among so many counts
            value = ((bits >> shift) & ((1 << field) - 1)).to(tl.int32)
            one = (value * 0 + 1).to(tl.int64)
            tl.atomic_add(counts + value, one, mask=counted, sem="relaxed")
    if FEW:
        add_counts(counts, found)


@triton.jit(do_not_specialize=["size", "many", "steps"])
def _count_by_limit(
    x, size, limits, many, counts, steps,
    PARTS: tl.constexpr, TILE: tl.constexpr, FIELD: tl.constexpr,
):  # fmt: skip
    """Count the entries by the last limit that they reach."""
    program = tl.program_id(0).to(tl.int64)
    least = tl.maximum(tl.load(limits), 1)
    found = no_counts()
    for part in range(PARTS):
        place = (program * PARTS + part) * TILE + tl.arange(0, TILE)
        bits = magnitude_bits(tl.load(x + place, mask=place < size, other=0.0))
        counted = bits >= least
        first = tl.zeros((TILE,), tl.int32)
        # Entries below all limits search nothing.
        above = lower_bound(limits, first, tl.where(counted, many, first), bits + 1, steps)
        found += count_field(above - 1, counted, 0, FIELD)
    add_counts(counts, found)


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
def _find_rows(
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
def _emit_rows(
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


def _largest_of_chunks(
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
    shape = {"TILES": -(-chunk // columns), "ROWS": _TILE // columns, "COLUMNS": columns}
    kth, counts = x.new_empty(2, rows, dtype=torch.int64)
    room = x.new_empty(rows, dtype=torch.int32)
    programs = -(-rows // shape["ROWS"])
    launch(
        _find_rows, programs, x, size, chunk, k, rows, kth, room, counts,
        WIDTH=bits_width(x.dtype), **shape,
    )  # fmt: skip
    before = counts.cumsum(dim=0)
    most = min(k, chunk) * (size // chunk) + min(k, size % chunk)
    indices, values = x.new_empty(most, dtype=index_dtype(size)), x.new_empty(most)
    launch(
        _emit_rows, programs, x, size, chunk, rows, kth, room, before, indices, values, x,
        CLEAR=clear, **shape,
    )  # fmt: skip
    return indices, values, before[-1:]
