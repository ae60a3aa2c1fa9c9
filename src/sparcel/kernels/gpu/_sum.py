"""Sums that are selected from: their sample, and the pass that adds and marks, on a GPU."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sparcel import device
from sparcel.kernels.addition import Addition
from sparcel.kernels.gpu._bits import bits_of, bits_width, magnitude_bits
from sparcel.kernels.gpu._compact import (
    AT_ABOVE,
    ROWS,
    SPAN,
    Marks,
    load_inside,
    mark_tile,
    spans_of,
    words_for,
)
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.gpu._radix import FIELD


class Sum(NamedTuple):
    """What kernels need in order to compute an addition.

    ``factors`` holds the scale and the momentum. ``parts`` tells which vectors there are.
    """

    memory: Tensor
    gradient: Tensor
    velocity: Tensor
    factors: Tensor
    parts: dict[str, bool]


def sum_of(addition: Addition) -> Sum:
    memory, velocity = addition.memory, addition.velocity
    scaled = addition.scale != 1
    factors = memory
    if scaled or velocity is not None:
        numbers = [addition.scale, addition.momentum]
        factors = device.put(numbers, memory.device, memory.dtype)
    return Sum(
        memory,
        addition.gradient.detach(),
        memory if velocity is None else velocity,
        factors,
        {"ADDED": True, "SCALED": scaled, "MOVING": velocity is not None},
    )


def vector_alone(x: Tensor) -> Sum:
    """Return the sum that is ``x`` itself."""
    return Sum(x, x, x, x, {"ADDED": False, "SCALED": False, "MOVING": False})


@triton.jit
def _sum_at(
    memory, gradient, velocity, factors, place, size, WHOLE: tl.constexpr,
    ADDED: tl.constexpr, SCALED: tl.constexpr, MOVING: tl.constexpr,
):  # fmt: skip
    """Return what enters the memory, and the sum."""
    total = load_inside(memory, place, size, WHOLE)
    entering = total
    if ADDED:
        entering = load_inside(gradient, place, size, WHOLE).to(total.dtype)
        if SCALED:
            entering = entering * tl.load(factors)
        if MOVING:
            moving = load_inside(velocity, place, size, WHOLE)
            entering = entering + moving * tl.load(factors + 1)
        total = entering + total
    return entering, total


@triton.jit
def _nth(bits, counted, shift, nth, FIELD: tl.constexpr):
    """Return the field of the ``nth`` largest of the counted, and how many have a larger one."""
    field = ((bits >> shift) & ((1 << FIELD) - 1)).to(tl.int32)
    found = tl.histogram(field, 1 << FIELD, mask=counted)
    reaching = tl.cumsum(found, axis=0, reverse=True)
    place = tl.sum((reaching >= nth).to(tl.int32), axis=0) - 1
    larger = tl.sum(tl.where(tl.arange(0, 1 << FIELD) > place, found, 0), axis=0)
    return place, larger


@triton.jit
def _find_threshold(
    memory, gradient, velocity, factors, size, rule, rank,
    ADDED: tl.constexpr, SCALED: tl.constexpr, MOVING: tl.constexpr,
    FIELD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, NEXT: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """Let pass what reaches the upper bits of the magnitude of that rank in the sample."""
    number = tl.arange(0, SAMPLES)
    stride = size // SAMPLES
    # A sample at equal distances would see one column of a matrix.
    offset = ((number * 40503) & 0xFFFF).to(tl.int64) * stride >> 16
    place = number.to(tl.int64) * stride + offset
    _, total = _sum_at(
        memory, gradient, velocity, factors, place, size, False, ADDED, SCALED, MOVING
    )
    bits = magnitude_bits(total)
    upper, larger = _nth(bits, bits >= 0, FIRST, rank, FIELD)
    same = ((bits >> FIRST) & ((1 << FIELD) - 1)) == upper
    lower, _ = _nth(bits, same, SECOND, rank - larger, NEXT)
    threshold = ((upper.to(tl.int64) << NEXT) | lower.to(tl.int64)) << SECOND
    tl.store(rule + AT_ABOVE, tl.maximum(threshold - 1, 0))


def sample(sum: Sum, rule: Tensor, samples: int, rank: int) -> None:
    """Write the threshold that a sample gives to ``rule``."""
    first = bits_width(sum.memory.dtype) - FIELD
    second = max(0, first - FIELD)
    launch(
        _find_threshold, 1, *sum[:4], sum.memory.numel(), rule, rank, **sum.parts,
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
    memory, gradient, velocity, factors, scratch, entering_to, size, infinite, rule, above, span,
    WHOLE: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, MOVING: tl.constexpr,
    KEPT: tl.constexpr, CLEAR: tl.constexpr, MARK: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add a span, and return how many of its entries pass the rule."""
    count = 0
    for tile in range(SPAN // (ROWS * 32)):
        row = tile * ROWS + tl.arange(0, ROWS)
        place = span * SPAN + row[:, None] * 32 + tl.arange(0, 32)[None, :]
        entering, total = _sum_at(
            memory, gradient, velocity, factors, place, size, WHOLE, ADDED, SCALED, MOVING
        )
        _store_inside(scratch, place, total, size, WHOLE)
        if KEPT:
            _store_inside(entering_to, place, entering, size, WHOLE)
        if CLEAR:
            zero = tl.zeros_like(total).to(gradient.dtype.element_ty)
            _store_inside(gradient, place, zero, size, WHOLE)
        bits = magnitude_bits(total)
        peak = tl.max(tl.max(bits, axis=1), axis=0)
        tl.atomic_max(rule, 1, mask=peak >= infinite, sem="relaxed")
        if MARK:
            above_all = tl.load(rule + AT_ABOVE).to(bits.dtype)
            word = span * (SPAN // 32) + row
            found, _ = mark_tile(bits, above_all, 0, word, above, above, False)
            count += found
    return count


@triton.jit
def _add_and_mark(
    memory, gradient, velocity, factors, scratch, entering_to, size, infinite, rule, above, counts,
    ADDED: tl.constexpr, SCALED: tl.constexpr, MOVING: tl.constexpr,
    KEPT: tl.constexpr, CLEAR: tl.constexpr, MARK: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0).to(tl.int64)
    if (span + 1) * SPAN <= size:
        count = _add_span(
            memory, gradient, velocity, factors, scratch, entering_to, size, infinite, rule, above,
            span, True, ADDED, SCALED, MOVING, KEPT, CLEAR, MARK, SPAN, ROWS,
        )  # fmt: skip
    else:  # with smaller tiles, since lanes read one entry at a time
        count = _add_span(
            memory, gradient, velocity, factors, scratch, entering_to, size, infinite, rule, above,
            span, False, ADDED, SCALED, MOVING, KEPT, CLEAR, MARK, SPAN, ROWS // 4,
        )  # fmt: skip
    if MARK:
        tl.store(counts + span, count)


def accumulate(sum: Sum, addition: Addition, rule: Tensor, marking: bool) -> Marks | None:
    """Add, and mark what passes the rule; ``rule[FAULT]`` becomes 1 if the sum is not finite."""
    scratch, entering = addition.scratch, addition.entering
    size = scratch.numel()
    spans = spans_of(size)
    above = words_for(scratch, size if marking else 0)
    counts = rule.new_empty(spans)
    launch(
        _add_and_mark, spans, *sum[:4], scratch, scratch if entering is None else entering,
        size, bits_of(math.inf, scratch.dtype), rule, above, counts, **sum.parts,
        KEPT=entering is not None, CLEAR=addition.clear, MARK=marking, SPAN=SPAN, ROWS=ROWS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return Marks(above, counts.cumsum(dim=0)) if marking else None
