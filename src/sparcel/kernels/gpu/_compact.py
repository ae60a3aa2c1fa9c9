"""Compaction: the entries of a vector whose magnitudes pass, in the order of their places.

It takes two kernels. `mark` reads the vector and writes a bit an entry, and how many pass of each
span. `emit` reads the bits alone and fetches the entries that passed, so the vector is read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.gpu._bits import magnitude_bits
from sparcel.kernels.gpu._launch import launch

SPAN = 8192
"""Entries of a vector that one program marks or emits."""
_TILE = 4096
ROWS = _TILE // 32

FAULT, ABOVE, TIES, FIRST, ROOM, EMITTED = range(6)
"""What a `rule` holds, and what `emit` adds to it."""
AT_ABOVE, AT_TIES = tl.constexpr(ABOVE), tl.constexpr(TIES)
AT_FIRST, AT_ROOM, AT_EMITTED = tl.constexpr(FIRST), tl.constexpr(ROOM), tl.constexpr(EMITTED)
"""The same, for kernels; the fault is at the beginning."""
RULE_LENGTH = 8


class Marks(NamedTuple):
    """Which entries of a vector pass a rule.

    Attributes
    ----------
    above, ties
        A bit an entry, int32 ``[spans * SPAN / 32]``: those that pass, and those of which a number
        passes. ``ties`` is None where there are none.
    above_before, ties_before
        int64 ``[spans]``: how many of them there are up to the end of each span.
    """

    above: Tensor
    above_before: Tensor
    ties: Tensor | None = None
    ties_before: Tensor | None = None


@triton.jit
def load_inside(x, place, size, WHOLE: tl.constexpr):
    """Return entries, 0 beyond the end.

    Where the caller knows that all are ``WHOLE``, inside of the vector, each lane reads several at
    once, whatever the vector's length.
    """
    if WHOLE:
        value = tl.load(x + place)
    else:
        value = tl.load(x + place, mask=place < size, other=0.0)
    return value


@triton.jit
def mark_tile(bits, above_all, ties_above, word, above, ties, TIES: tl.constexpr):
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


@triton.jit
def _mark_span(
    x, size, rule, span, above, ties,
    TIES: tl.constexpr, WHOLE: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    count, tied = 0, 0
    for tile in range(SPAN // (ROWS * 32)):
        row = tile * ROWS + tl.arange(0, ROWS)
        place = span * SPAN + row[:, None] * 32 + tl.arange(0, 32)[None, :]
        bits = magnitude_bits(load_inside(x, place, size, WHOLE))
        above_all = tl.load(rule + AT_ABOVE).to(bits.dtype)
        ties_above = tl.load(rule + AT_TIES).to(bits.dtype)
        found, equal = mark_tile(
            bits, above_all, ties_above, span * (SPAN // 32) + row, above, ties, TIES
        )
        count += found
        tied += equal
    return count, tied


@triton.jit
def _mark(
    x, size, limit, rule, above, ties, above_counts, ties_counts,
    TIES: tl.constexpr, LIMITED: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0).to(tl.int64)
    if LIMITED:  # the vector ends where the GPU says
        size = tl.minimum(tl.load(limit), size)
    if (span + 1) * SPAN <= size:
        count, tied = _mark_span(x, size, rule, span, above, ties, TIES, True, SPAN, ROWS)
    else:
        count, tied = _mark_span(x, size, rule, span, above, ties, TIES, False, SPAN, ROWS // 4)
    tl.store(above_counts + span, count)
    if TIES:
        tl.store(ties_counts + span, tied)


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
def _emit(
    x, names, above, ties, above_before, ties_before, rule, spans, capacity, cleared,
    indices, values,
    TIES: tl.constexpr, NAMED: tl.constexpr, CLEAR: tl.constexpr, SPAN: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Let each lane take the entries of one word, lowest first."""
    span = tl.program_id(0).to(tl.int64)
    word = span * WORDS + tl.arange(0, WORDS)
    passing = tl.load(above + word)
    sure = _ones(passing)
    last = spans - 1
    start = tl.load(above_before + span - 1, mask=span > 0, other=0)
    total = tl.load(above_before + last)
    taken = sure
    tie_number = sure.to(tl.int64) * 0
    first, stop = tl.load(rule + AT_FIRST), tl.load(rule + AT_FIRST)
    if TIES:
        tied = tl.load(ties + word)
        stop = first + tl.load(rule + AT_ROOM)
        before = tl.load(ties_before + span - 1, mask=span > 0, other=0)
        there = _ones(tied)
        tie_number = before + tl.cumsum(there, axis=0) - there
        low = tl.minimum(tl.maximum(tie_number, first), stop)
        high = tl.minimum(tl.maximum(tie_number + there, first), stop)
        taken = sure + (high - low).to(tl.int32)
        start += tl.minimum(tl.maximum(before, first), stop) - first
        all_ties = tl.load(ties_before + last)
        total += tl.minimum(tl.maximum(all_ties, first), stop) - first
        passing = passing | tied
    slot = start + tl.cumsum(taken, axis=0) - taken
    for _ in range(tl.max(_ones(passing), axis=0)):
        more = passing != 0
        lane = _lowest(passing) & 31  # of a word without bits it would be 32
        kept = more
        if TIES:
            is_tie = more & (((tied >> lane) & 1) != 0)
            kept = more & ((is_tie == 0) | ((tie_number >= first) & (tie_number < stop)))
            tie_number += is_tie.to(tl.int64)
        kept = kept & (slot < capacity)
        place = word * 32 + lane
        value = tl.load(x + place, mask=kept)
        name = place
        if NAMED:
            name = tl.load(names + place, mask=kept).to(tl.int64)
        tl.store(indices + slot, name.to(indices.dtype.element_ty), mask=kept)
        tl.store(values + slot, value, mask=kept)
        if CLEAR:
            tl.store(cleared + name, tl.zeros_like(value), mask=kept)
        slot += kept.to(tl.int64)
        passing = passing & (passing - 1)
    if span == 0:
        tl.store(rule + AT_EMITTED, total)


def spans_of(size: int) -> int:
    """Return how many spans a vector has."""
    return -(-size // SPAN)


def words_for(x: Tensor, size: int) -> Tensor:
    """Return memory for a bit an entry, which `mark` fills whole."""
    return x.new_empty(spans_of(size) * SPAN // 32, dtype=torch.int32)


def mark(x: Tensor, rule: Tensor, limit: Tensor | None = None, ties: bool = True) -> Marks:
    """Find which entries of ``x`` pass ``rule``.

    Parameters
    ----------
    rule
        int64 ``[RULE_LENGTH]``. Entries whose magnitude has more than the bits ``rule[ABOVE]``
        pass. The others with more than ``rule[TIES]`` are numbered in the order of their places;
        those with the numbers ``[rule[FIRST], rule[FIRST] + rule[ROOM])`` pass.
    limit
        int64 ``[]``; entries from there on do not count.
    ties
        Whether there are any of the latter.
    """
    spans = spans_of(x.numel())
    above = words_for(x, x.numel())
    tied = words_for(x, x.numel()) if ties else above
    counts = rule.new_empty(1 + ties, spans)
    launch(
        _mark, spans, x, x.numel(), rule if limit is None else limit, rule, above, tied,
        counts[0], counts[-1],
        TIES=ties, LIMITED=limit is not None, SPAN=SPAN, ROWS=ROWS,
    )  # fmt: skip
    before = counts.cumsum(dim=1)
    return Marks(above, before[0], tied, before[1]) if ties else Marks(above, before[0])


def emit(
    x: Tensor,
    marks: Marks,
    rule: Tensor,
    capacity: int,
    index_dtype: torch.dtype,
    names: Tensor | None = None,
    cleared: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the indices and values of marked entries; ``rule[EMITTED]`` becomes their number.

    Parameters
    ----------
    capacity
        How many there is memory for; the others are left out.
    names
        The index of each entry; None for its place.
    cleared
        A vector that is set to 0 at the indices.
    """
    indices = x.new_empty(capacity, dtype=index_dtype)
    values = x.new_empty(capacity)
    ties = marks.ties is not None
    launch(
        _emit, spans_of(x.numel()), x, indices if names is None else names, marks.above,
        marks.ties if ties else marks.above, marks.above_before,
        marks.ties_before if ties else marks.above_before, rule, spans_of(x.numel()), capacity,
        values if cleared is None else cleared, indices, values,
        TIES=ties, NAMED=names is not None, CLEAR=cleared is not None, SPAN=SPAN,
        WORDS=SPAN // 32,
    )  # fmt: skip
    return indices, values
