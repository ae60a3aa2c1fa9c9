"""Compaction: the entries of a vector whose magnitudes pass, in the order of their places.

It takes two kernels. One reads the vector and marks: it writes a bit an entry, and how many pass of
each span and group of spans. `emit` reads the bits alone and fetches the entries that passed, so
the vector is read once. `_sum` marks what passes a threshold, `mark_largest` what is selected.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.gpu._bits import bits_width, magnitude_bits
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.gpu._radix import add_counts, count_field, no_counts, way_to
from sparcel.kernels.gpu._work import (
    FIELD,
    GROUP,
    SPAN,
    add_span,
    before_span,
    groups_at,
    histogram_at,
    levels_of,
    passed_at,
    room_at,
    selected_at,
    spans_of,
    tied_at,
)

_TILE = 4096
ROWS = _TILE // 32
_WORDS = SPAN // 32


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
        found, equal = mark_tile(
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
        more = passing != 0
        lane = _lowest(passing) & 31  # of a word without bits it would be 32
        kept = more
        if SELECTED:
            is_tie = more & (((tied >> lane) & 1) != 0)
            kept = more & ((is_tie == 0) | (tie_number < room))
            tie_number += is_tie.to(tl.int64)
        kept = kept & (slot < capacity)
        place = word * 32 + lane
        value = tl.load(x + place, mask=kept, other=0.0)
        name = place
        if NAMED:
            name = tl.load(names + place, mask=kept).to(tl.int64)
        tl.store(indices + slot, name.to(indices.dtype.element_ty), mask=kept)
        tl.store(values + slot, value, mask=kept)
        if CLEAR:
            tl.store(cleared + name, tl.zeros_like(value), mask=kept)
        if COUNTED:
            BITS: tl.constexpr = FIELD if WIDTH > FIELD else WIDTH
            found += count_field(magnitude_bits(value), kept, WIDTH - BITS, BITS)
        slot += kept.to(tl.int64)
        passing = passing & (passing - 1)
    if COUNTED:
        add_counts(histogram_at(work, 0), found)


def marks_for(x: Tensor, kinds: int) -> Tensor:
    """Return memory for a bit an entry, for each kind, and then for the counts of spans."""
    return x.new_empty(kinds * spans_of(x.numel()) * (_WORDS + 1), dtype=torch.int32)


def mark_largest(x: Tensor, k: int, work: Tensor, limited: bool) -> Tensor:
    """Mark the k largest of a vector, and what equals the k-th largest; return the marks.

    `find_kth`, with the same arguments, comes before.
    """
    marks = marks_for(x, 2)
    launch(
        _mark_largest, spans_of(x.numel()), x, x.numel(), work, k, marks,
        LIMITED=limited, LEVELS=levels_of(x.dtype), WIDTH=bits_width(x.dtype), FIELD=FIELD,
        SPAN=SPAN, ROWS=ROWS // 4, GROUP=GROUP,  # lanes read one entry at a time
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
