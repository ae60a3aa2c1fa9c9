"""Marks of what is selected from a vector or a sum, and the entries that are marked, in order.

It takes two kernels. One reads the vector and marks: it writes a bit an entry, and how many pass of
each span and group of spans. `emit` reads the bits alone and fetches the entries that passed, so
the vector is read once. `mark` marks what passes a threshold, which `sample` estimates;
`mark_largest` marks what is selected.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core.kernels.definitions.select import Addition
from sparcel.core.kernels.gpu._base import (
    GROUP,
    add_span,
    before_span,
    bits_width,
    is_infinite,
    launch,
    load_inside,
    magnitude_bits,
    number_bits,
    number_of,
    store_inside,
)
from sparcel.core.kernels.gpu._radix import (
    FIELD,
    RULE_LENGTH,
    SPAN,
    above_at,
    add_counts,
    count_field,
    groups_at,
    histogram_at,
    levels_of,
    next_bits,
    no_counts,
    passed_at,
    room_at,
    selected_at,
    spans_of,
    tied_at,
    way_to,
)

_ROWS = 4096 // 32
_WORDS = SPAN // 32


def _marks_for(x: Tensor, kinds: int) -> Tensor:
    """Return memory for a bit an entry, for each kind, and then for the counts of spans."""
    return x.new_empty(kinds * spans_of(x.numel()) * (_WORDS + 1), dtype=torch.int32)


@triton.jit
def _mark_tile(bits, above_all, ties_above, word, above, ties, TIES: tl.constexpr):
    """Write the bits of ``[ROWS, 32]`` entries; return how many are above, and how many ties.

    Zeros pass no rule, so neither does what lies beyond the end.
    """
    lane = tl.arange(0, 32)[None, :]
    is_above = bits > above_all
    tl.store(above + word, tl.sum(is_above.to(tl.int32) << lane, axis=1))
    count = tl.sum(tl.sum(is_above.to(tl.int32), axis=1), axis=0)
    tied = count * 0
    if TIES:
        is_tie = (bits > ties_above) & (bits <= above_all)
        tl.store(ties + word, tl.sum(is_tie.to(tl.int32) << lane, axis=1))
        tied = tl.sum(tl.sum(is_tie.to(tl.int32), axis=1), axis=0)
    return count, tied


class Sum(NamedTuple):
    """What kernels need in order to compute an addition, or to read a vector.

    ``scale`` and ``momentum`` are as `number_bits` returns them. ``parts`` tells which vectors
    there are, and ``effects`` what happens besides to what enters and to the gradient.
    """

    memory: Tensor
    gradient: Tensor
    velocity: Tensor
    scale: int
    momentum: int
    scratch: Tensor
    entering: Tensor
    parts: dict[str, bool]
    effects: dict[str, bool]


_FACTORS = ["size", "scale", "momentum"]


def sum_of(addition: Addition) -> Sum:
    memory, velocity, entering = addition.memory, addition.velocity, addition.entering
    return Sum(
        memory,
        addition.gradient.detach(),
        memory if velocity is None else velocity,
        number_bits(addition.scale),
        number_bits(addition.momentum),
        addition.scratch,
        addition.scratch if entering is None else entering,
        {"ADDED": True, "SCALED": addition.scale != 1, "MOVING": velocity is not None},
        {"KEPT": entering is not None, "CLEAR": addition.clear},
    )


def vector_alone(x: Tensor) -> Sum:
    """Return the sum that is ``x`` itself."""
    parts = {"ADDED": False, "SCALED": False, "MOVING": False}
    return Sum(x, x, x, 0, 0, x, x, parts, {"KEPT": False, "CLEAR": False})


@triton.jit
def _sum_at(
    memory, gradient, velocity, scale, momentum, place, size, WHOLE: tl.constexpr,
    ADDED: tl.constexpr, SCALED: tl.constexpr, MOVING: tl.constexpr,
):  # fmt: skip
    """Return what enters the memory, and the sum."""
    total = load_inside(memory, place, size, WHOLE)
    entering = total
    if ADDED:
        entering = load_inside(gradient, place, size, WHOLE).to(total.dtype)
        if SCALED:
            entering = entering * number_of(scale, total.dtype)
        if MOVING:
            moving = load_inside(velocity, place, size, WHOLE)
            entering = entering + moving * number_of(momentum, total.dtype)
        total = entering + total
    return entering, total


@triton.jit
def _threshold(
    memory, gradient, velocity, scale, momentum, size, rank,
    ADDED: tl.constexpr, SCALED: tl.constexpr, MOVING: tl.constexpr,
    FIELD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, NEXT: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """Return the upper bits of the magnitude of that rank in a sample."""
    number = tl.arange(0, SAMPLES)
    stride = size // SAMPLES
    # A sample at equal distances would see one column of a matrix.
    offset = ((number * 40503) & 0xFFFF).to(tl.int64) * stride >> 16
    place = number.to(tl.int64) * stride + offset
    _, total = _sum_at(
        memory, gradient, velocity, scale, momentum, place, size, False, ADDED, SCALED, MOVING
    )
    bits = magnitude_bits(total)
    upper, rank = next_bits(bits, bits >= 0, 0, rank, FIRST, FIELD)
    upper, _ = next_bits(bits, bits >= 0, upper, rank, SECOND, NEXT)
    return upper.to(tl.int64) << SECOND


@triton.jit(do_not_specialize=[*_FACTORS, "length", "rank"])
def _begin(
    memory, gradient, velocity, scale, momentum, size, work, length, rank,
    ADDED: tl.constexpr, SCALED: tl.constexpr, MOVING: tl.constexpr,
    FIELD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, NEXT: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """Let pass what reaches a threshold; all else in the memory of the selection becomes 0."""
    program = tl.program_id(0).to(tl.int64)
    if program == 0:
        threshold = _threshold(
            memory, gradient, velocity, scale, momentum, size, rank, ADDED, SCALED, MOVING,
            FIELD, FIRST, SECOND, NEXT, SAMPLES,
        )  # fmt: skip
        field = tl.arange(0, 8)
        at_above = field == 1  # as `above_at` has it
        tl.store(work + field, tl.where(at_above, tl.maximum(threshold - 1, 0), 0))
    else:
        place = (program - 1) * SAMPLES + tl.arange(0, SAMPLES)
        zeros = tl.zeros((SAMPLES,), tl.int64)
        tl.store(selected_at(work) + place, zeros, mask=place < length)


def sample(sum: Sum, work: Tensor, samples: int, rank: int) -> None:
    """Fill ``work`` with zeros, and write the threshold that a sample gives."""
    first = bits_width(sum.memory.dtype) - FIELD
    second, length = max(0, first - FIELD), work.numel() - RULE_LENGTH
    launch(
        _begin, 1 + triton.cdiv(length, samples), *sum[:5], sum.memory.numel(), work, length, rank,
        **sum.parts,
        FIELD=FIELD, FIRST=first, SECOND=second, NEXT=first - second, SAMPLES=samples,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _add_span(
    memory, gradient, velocity, scale, momentum, scratch, entering_to, size, work, above, span,
    WHOLE: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, MOVING: tl.constexpr,
    KEPT: tl.constexpr, CLEAR: tl.constexpr, MARK: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add a span, and return how many of its entries pass the threshold."""
    count = 0
    for tile in range(SPAN // (ROWS * 32)):
        row = tile * ROWS + tl.arange(0, ROWS)
        place = span * SPAN + row[:, None] * 32 + tl.arange(0, 32)[None, :]
        entering, total = _sum_at(
            memory, gradient, velocity, scale, momentum, place, size, WHOLE, ADDED, SCALED, MOVING
        )
        bits = magnitude_bits(total)
        if ADDED:
            store_inside(scratch, place, total, size, WHOLE)
            peak = tl.max(tl.max(bits, axis=1), axis=0)
            tl.atomic_max(work, 1, mask=is_infinite(peak), sem="relaxed")
        if KEPT:
            store_inside(entering_to, place, entering, size, WHOLE)
        if CLEAR:
            zero = tl.zeros_like(total).to(gradient.dtype.element_ty)
            store_inside(gradient, place, zero, size, WHOLE)
        if MARK:
            above_all = tl.load(above_at(work)).to(bits.dtype)
            word = span * (SPAN // 32) + row
            found, _ = _mark_tile(bits, above_all, 0, word, above, above, False)
            count += found
    return count


@triton.jit(do_not_specialize=_FACTORS)
def _add_and_mark(
    memory, gradient, velocity, scale, momentum, scratch, entering_to, size, work, marks,
    ADDED: tl.constexpr, SCALED: tl.constexpr, MOVING: tl.constexpr,
    KEPT: tl.constexpr, CLEAR: tl.constexpr, MARK: tl.constexpr,
    WIDTH: tl.constexpr, FIELD: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0).to(tl.int64)
    if (span + 1) * SPAN <= size:
        count = _add_span(
            memory, gradient, velocity, scale, momentum, scratch, entering_to, size, work, marks,
            span, True, ADDED, SCALED, MOVING, KEPT, CLEAR, MARK, SPAN, ROWS,
        )  # fmt: skip
    else:  # with smaller tiles, since lanes read one entry at a time
        count = _add_span(
            memory, gradient, velocity, scale, momentum, scratch, entering_to, size, work, marks,
            span, False, ADDED, SCALED, MOVING, KEPT, CLEAR, MARK, SPAN, ROWS // 4,
        )  # fmt: skip
    if MARK:
        counts = marks + tl.num_programs(0).to(tl.int64) * (SPAN // 32)
        groups = groups_at(work, WIDTH, FIELD)
        add_span(groups, 0, passed_at(work), counts, span, count, GROUP)


def mark(sum: Sum, work: Tensor, marking: bool = True) -> Tensor:
    """Add, and return marks of what passes the threshold, none unless ``marking``.

    The fault becomes 1 if the sum is not finite.
    """
    size = sum.scratch.numel()
    marks = _marks_for(sum.scratch, 1) if marking else work
    launch(
        _add_and_mark, spans_of(size), *sum[:7], size, work, marks, **sum.parts, **sum.effects,
        MARK=marking, WIDTH=bits_width(sum.scratch.dtype), FIELD=FIELD, SPAN=SPAN, ROWS=_ROWS,
        GROUP=GROUP, enable_fp_fusion=False,
    )  # fmt: skip
    return marks


@triton.jit(do_not_specialize=["size", "k"])
def _mark_largest(
    x, size, work, k, marks,
    LIMITED: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, FIELD: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Mark what is larger than the k-th largest, and what equals it."""
    span = tl.program_id(0).to(tl.int64)
    kth, room = way_to(work, size, k, LEVELS, LIMITED, WIDTH, FIELD)
    if span == 0:
        tl.store(room_at(selected_at(work)), room)
    stop = size.to(tl.int64)
    if LIMITED:
        stop = tl.minimum(tl.load(passed_at(work)), stop)
    spans = tl.num_programs(0).to(tl.int64)
    words = spans * (SPAN // 32)
    count, tied = 0, 0
    for tile in range(SPAN // (ROWS * 32)):
        row = tile * ROWS + tl.arange(0, ROWS)
        place = span * SPAN + row[:, None] * 32 + tl.arange(0, 32)[None, :]
        bits = magnitude_bits(load_inside(x, place, stop, False))
        all_above = kth.to(bits.dtype)
        found, equal = _mark_tile(
            bits, all_above, all_above - 1, span * (SPAN // 32) + row, marks, marks + words, True
        )
        count += found
        tied += equal
    groups = groups_at(work, WIDTH, FIELD)
    counts = marks + 2 * words
    rule = selected_at(work)
    add_span(groups, 1, passed_at(rule), counts, span, count, GROUP)
    add_span(groups, 2, tied_at(rule), counts + spans, span, tied, GROUP)


@triton.jit
def _ones(word):
    """Return how many bits of int32 words are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF


@triton.jit
def _lowest(word):
    """Return the place of the lowest bit that is set in int32 words."""
    return _ones((word & (-word)) - 1)


@triton.jit
def _take(
    x, names, place, kept, slot, cleared, indices, values,
    NAMED: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Write entries to their slots, and return their values."""
    value = tl.load(x + place, mask=kept, other=0.0)
    name = place
    if NAMED:
        name = tl.load(names + place, mask=kept).to(tl.int64)
    tl.store(indices + slot, name.to(indices.dtype.element_ty), mask=kept)
    tl.store(values + slot, value, mask=kept)
    if CLEAR:
        tl.store(cleared + name, tl.zeros_like(value), mask=kept)
    return value


@triton.jit(do_not_specialize=["capacity"])
def _emit(
    x, names, work, marks, capacity, cleared, indices, values,
    SELECTED: tl.constexpr, NAMED: tl.constexpr, CLEAR: tl.constexpr, COUNTED: tl.constexpr,
    WIDTH: tl.constexpr, FIELD: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Let each lane take the entries of one word, lowest first."""
    span = tl.program_id(0).to(tl.int64)
    spans = tl.num_programs(0).to(tl.int64)
    words = spans * WORDS
    word = span * WORDS + tl.arange(0, WORDS)
    groups = groups_at(work, WIDTH, FIELD)
    passing = tl.load(marks + word)
    taken = _ones(passing)
    if SELECTED:
        tied = tl.load(marks + words + word)
        room = tl.load(room_at(selected_at(work)))
        counts = marks + 2 * words
        before = before_span(groups, 2, counts + spans, span, GROUP)
        there = _ones(tied)
        tie_number = before + tl.cumsum(there, axis=0) - there
        taken += tl.minimum(tl.maximum(room - tie_number, 0), there).to(tl.int32)
        start = before_span(groups, 1, counts, span, GROUP) + tl.minimum(before, room)
        passing = passing | tied
    else:
        start = before_span(groups, 0, marks + words, span, GROUP)
    slot = start + tl.cumsum(taken, axis=0) - taken
    found = no_counts()
    for _ in range(tl.max(_ones(passing), axis=0)):
        kept = passing != 0
        lane = _lowest(passing) & 31  # of a word without bits it would be 32
        if SELECTED:
            is_tie = kept & (((tied >> lane) & 1) != 0)
            kept = kept & ((is_tie == 0) | (tie_number < room))
            tie_number += is_tie.to(tl.int64)
        kept = kept & (slot < capacity)
        place = word * 32 + lane
        value = _take(x, names, place, kept, slot, cleared, indices, values, NAMED, CLEAR)
        if COUNTED:
            BITS: tl.constexpr = FIELD if WIDTH > FIELD else WIDTH
            found += count_field(magnitude_bits(value), kept, WIDTH - BITS, BITS)
        slot += kept.to(tl.int64)
        passing = passing & (passing - 1)
    if COUNTED:
        add_counts(histogram_at(work, 0), found)


def mark_largest(x: Tensor, k: int, work: Tensor, limited: bool) -> Tensor:
    """Mark the k largest of a vector, and what equals the k-th largest; return the marks.

    `find_kth`, with the same arguments, comes before.
    """
    marks = _marks_for(x, 2)
    launch(
        _mark_largest, spans_of(x.numel()), x, x.numel(), work, k, marks,
        LIMITED=limited, LEVELS=levels_of(x.dtype), WIDTH=bits_width(x.dtype), FIELD=FIELD,
        SPAN=SPAN, ROWS=_ROWS // 4, GROUP=GROUP,  # lanes read one entry at a time
    )  # fmt: skip
    return marks


def emit(
    x: Tensor,
    marks: Tensor,
    work: Tensor,
    capacity: int,
    index_dtype: torch.dtype,
    names: Tensor | None = None,
    cleared: Tensor | None = None,
    selected: bool = False,
    counted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the indices and values of marked entries.

    Parameters
    ----------
    capacity
        How many there is memory for; the others are left out.
    names
        The index of each entry; None for its place.
    cleared
        A vector that is set to 0 at the indices.
    selected
        Whether `mark_largest` made the marks; otherwise they tell what passes a threshold.
    counted
        Whether `find_kth` will look for the k-th largest of the values.
    """
    indices, values = x.new_empty(capacity, dtype=index_dtype), x.new_empty(capacity)
    launch(
        _emit, spans_of(x.numel()), x, indices if names is None else names, work, marks, capacity,
        values if cleared is None else cleared, indices, values,
        SELECTED=selected, NAMED=names is not None, CLEAR=cleared is not None, COUNTED=counted,
        WIDTH=bits_width(x.dtype), FIELD=FIELD, WORDS=_WORDS, GROUP=GROUP,
    )  # fmt: skip
    return indices, values
