"""Sums that are selected from: their sample, and the pass that adds and marks, on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.addition import Addition
from sparcel.kernels.gpu._bits import (
    bits_width,
    is_infinite,
    magnitude_bits,
    number_bits,
    number_of,
)
from sparcel.kernels.gpu._compact import ROWS, load_inside, mark_tile, marks_for
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.gpu._radix import next_bits
from sparcel.kernels.gpu._work import (
    FIELD,
    GROUP,
    RULE_LENGTH,
    SPAN,
    above_at,
    add_span,
    groups_at,
    passed_at,
    selected_at,
    spans_of,
)


class Sum(NamedTuple):
    """What kernels need in order to compute an addition.

    ``scale`` and ``momentum`` are as `number_bits` returns them; ``parts`` tells which vectors
    there are.
    """

    memory: Tensor
    gradient: Tensor
    velocity: Tensor
    scale: int
    momentum: int
    parts: dict[str, bool]


_FACTORS = ["size", "scale", "momentum"]


def sum_of(addition: Addition) -> Sum:
    memory, velocity = addition.memory, addition.velocity
    return Sum(
        memory,
        addition.gradient.detach(),
        memory if velocity is None else velocity,
        number_bits(addition.scale),
        number_bits(addition.momentum),
        {"ADDED": True, "SCALED": addition.scale != 1, "MOVING": velocity is not None},
    )


def vector_alone(x: Tensor) -> Sum:
    """Return the sum that is ``x`` itself."""
    return Sum(x, x, x, 0, 0, {"ADDED": False, "SCALED": False, "MOVING": False})


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
def _store_inside(x, place, value, size, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(x + place, value)
    else:
        tl.store(x + place, value, mask=place < size)


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
            _store_inside(scratch, place, total, size, WHOLE)
            peak = tl.max(tl.max(bits, axis=1), axis=0)
            tl.atomic_max(work, 1, mask=is_infinite(peak), sem="relaxed")
        if KEPT:
            _store_inside(entering_to, place, entering, size, WHOLE)
        if CLEAR:
            zero = tl.zeros_like(total).to(gradient.dtype.element_ty)
            _store_inside(gradient, place, zero, size, WHOLE)
        if MARK:
            above_all = tl.load(above_at(work)).to(bits.dtype)
            word = span * (SPAN // 32) + row
            found, _ = mark_tile(bits, above_all, 0, word, above, above, False)
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


def accumulate(sum: Sum, addition: Addition, work: Tensor, marking: bool) -> Tensor | None:
    """Add, and mark what passes the threshold; the fault becomes 1 if the sum is not finite."""
    return _passed(sum, addition.scratch, addition.entering, addition.clear, work, marking)


def mark(x: Tensor, work: Tensor) -> Tensor:
    """Mark what passes the threshold."""
    marks = _passed(vector_alone(x), x, None, False, work, True)
    assert marks is not None, "it was told to mark"
    return marks


def _passed(
    sum: Sum, scratch: Tensor, entering: Tensor | None, clear: bool, work: Tensor, marking: bool
) -> Tensor | None:
    size = scratch.numel()
    marks = marks_for(scratch, 1) if marking else None
    launch(
        _add_and_mark, spans_of(size), *sum[:5], scratch, scratch if entering is None else entering,
        size, work, work if marks is None else marks, **sum.parts,
        KEPT=entering is not None, CLEAR=clear, MARK=marking, WIDTH=bits_width(scratch.dtype),
        FIELD=FIELD, SPAN=SPAN, ROWS=ROWS, GROUP=GROUP, enable_fp_fusion=False,
    )  # fmt: skip
    return marks
