"""Radix select: the k-th largest magnitude of a vector, from histograms of its bits.

Each level counts one field of the bits, of the magnitudes whose upper bits are those of the k-th
largest. No launch stands between two levels: every program of the next one reads off the histogram
of the last where the k-th largest is.

All kernels of a selection share one tensor, int64, that begins as zeros. First come two rules, for
what passes a threshold and for what is selected; then the way to the k-th largest and the
histograms on it; then how many pass of each group of spans, of each kind. Kernels get its places
from functions that have them as literals: Triton compares all global numbers of a kernel at each
launch, which takes the host as long as two arguments do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core.kernels.gpu._base import bits_width, groups_length, launch, magnitude_bits

FIELD = 11
BINS = 1 << FIELD
"""The most bits that a histogram tells apart, and its length."""

SPAN = 8192
"""Entries of a vector that one program marks or emits."""

FAULT, ABOVE, PASSED, ROOM, TIED = range(5)
"""The places of a rule.

Entries whose magnitudes have more than the bits ABOVE pass; PASSED is how many. Of the TIED ones
whose magnitudes have just these bits the first ROOM pass, too. FAULT is 1 if the sum is not finite.
"""
RULE_LENGTH = 8
_HEAD = 4 * RULE_LENGTH
"""Numbers before the histograms: two rules, and a path of up to 2 * 6."""


def levels_of(dtype: torch.dtype) -> int:
    """Return how many histograms lead to a magnitude of a dtype."""
    return -(-bits_width(dtype) // FIELD)


def spans_of(size: int) -> int:
    """Return how many spans a vector has."""
    return -(-size // SPAN)


def work_length(x: Tensor) -> int:
    """Return how many numbers the memory has for a vector like ``x``."""
    return _HEAD + levels_of(x.dtype) * BINS + groups_length(spans_of(x.numel()))


@triton.jit
def above_at(rule):
    return rule + 1


@triton.jit
def passed_at(rule):
    return rule + 2


@triton.jit
def room_at(rule):
    return rule + 3


@triton.jit
def tied_at(rule):
    return rule + 4


@triton.jit
def selected_at(work):
    """Return where the rule is for what is selected."""
    return work + 8


@triton.jit
def _path_at(work, LEVEL: tl.constexpr):
    """Return where the upper bits before a level are; how many are needed follows."""
    return work + 16 + 2 * LEVEL


@triton.jit
def histogram_at(work, LEVEL: tl.constexpr):
    return work + 32 + 2048 * LEVEL


@triton.jit
def groups_at(work, WIDTH: tl.constexpr, FIELD: tl.constexpr):
    """Return where the counts of groups are, for magnitudes of ``WIDTH`` bits."""
    return histogram_at(work, (WIDTH + FIELD - 1) // FIELD)


TILE = 1024
_MANY = 1 << 20
"""From so many entries on, a program counts several tiles before it adds to the common counts."""


@triton.jit
def no_counts():
    """Return the counts of a histogram, of which there are BINS, before anything is counted."""
    return tl.zeros((2048,), tl.int32)


@triton.jit
def count_field(bits, counted, shift, field):
    """Return how often each value of a field of the bits occurs."""
    value = ((bits >> shift) & ((1 << field) - 1)).to(tl.int32)
    return tl.histogram(value, 2048, mask=counted)


@triton.jit
def add_counts(counts, found):
    """Add to common counts, in any order."""
    bins = tl.arange(0, 2048)
    tl.atomic_add(counts + bins, found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit
def _place_of(found, nth):
    """Return the value of the ``nth`` largest of a histogram, and its rank among its equals."""
    reaching = tl.cumsum(found, axis=0, reverse=True)
    place = tl.maximum(tl.sum((reaching >= nth).to(tl.int32), axis=0) - 1, 0)
    larger = tl.sum(tl.where(tl.arange(0, found.numel) > place, found, 0), axis=0)
    return place, nth - larger


@triton.jit
def next_bits(bits, counted, upper, nth, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the next bits, too, of the ``nth`` largest of those whose ``upper`` bits are told.

    And the rank that it has among those that share these bits.
    """
    here = counted & ((bits >> (SHIFT + WIDTH)) == upper)
    field = ((bits >> SHIFT) & ((1 << WIDTH) - 1)).to(tl.int32)
    place, nth = _place_of(tl.histogram(field, 1 << WIDTH, mask=here), nth)
    return (upper << WIDTH) | place, nth


@triton.jit
def _descend(counts, needed, field):
    """Return the value of the ``needed``-th largest, and how many are needed of this value.

    All that there are if these are fewer. If none is needed, the largest value.
    """
    found = tl.load(counts + tl.arange(0, 2048))
    place, needed = _place_of(found, tl.minimum(needed, tl.sum(found, axis=0)))
    return tl.minimum(place, (1 << field) - 1).to(tl.int64), needed


@triton.jit
def way_to(
    work, size, k,
    LEVEL: tl.constexpr, LIMITED: tl.constexpr, WIDTH: tl.constexpr, FIELD: tl.constexpr,
):  # fmt: skip
    """Return the upper bits of the k-th largest before a level, and how many with these are needed.

    If ``LIMITED``, there is memory for ``size`` candidates. None is needed if more than that passed
    the threshold, or fewer than ``k``, unless these are all that is not 0.
    """
    upper = tl.full([], 0, tl.int64)
    if LEVEL < 2:
        needed = upper + k
        if LIMITED:
            passed = tl.load(passed_at(work))
            fit = (passed <= size) & ((passed >= k) | (tl.load(above_at(work)) == 0))
            needed = tl.where(fit, needed, 0)
    else:
        path = _path_at(work, LEVEL - 1)
        upper, needed = tl.load(path), tl.load(path + 1)
    if LEVEL > 0:
        LEFT: tl.constexpr = WIDTH - (LEVEL - 1) * FIELD
        BITS: tl.constexpr = FIELD if LEFT > FIELD else LEFT
        place, needed = _descend(histogram_at(work, LEVEL - 1), needed, BITS)
        upper = (upper << BITS) | place
    return upper, needed


@triton.jit(do_not_specialize=["size", "k"])
def _count_level(
    x, size, work, k,
    LEVEL: tl.constexpr, LIMITED: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, FIELD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    upper, needed = way_to(work, size, k, LEVEL, LIMITED, WIDTH, FIELD)
    if program == 0:
        path = _path_at(work, LEVEL)
        tl.store(path, upper)
        tl.store(path + 1, needed)
    stop = size.to(tl.int64)
    if LIMITED:
        stop = tl.minimum(tl.load(passed_at(work)), stop)
    LEFT: tl.constexpr = WIDTH - LEVEL * FIELD
    BITS: tl.constexpr = FIELD if LEFT > FIELD else LEFT
    found = no_counts()
    for part in range(PARTS):
        place = (program * PARTS + part) * TILE + tl.arange(0, TILE)
        bits = magnitude_bits(tl.load(x + place, mask=place < stop, other=0.0))
        counted = (bits != 0) & ((bits >> LEFT) == upper)  # there are no bits above the first field
        found += count_field(bits, counted, LEFT - BITS, BITS)
    add_counts(histogram_at(work, LEVEL), found)


def find_kth(x: Tensor, k: int, work: Tensor, limited: bool) -> None:
    """Write the histograms that lead to the k-th largest magnitude, or to the smallest nonzero one.

    Parameters
    ----------
    limited
        Whether ``x`` is memory for candidates, of which the first field has been counted.
    """
    programs, parts = parted(x.numel())
    for level in range(limited, levels_of(x.dtype)):
        launch(
            _count_level, programs, x, x.numel(), work, k,
            LEVEL=level, LIMITED=limited, PARTS=parts, WIDTH=bits_width(x.dtype), FIELD=FIELD,
            TILE=TILE,
        )  # fmt: skip


def parted(size: int) -> tuple[int, int]:
    """Return how many programs count a vector, at least one, and how many tiles each."""
    parts = 16 if size >= _MANY else 1
    return max(1, -(-size // (parts * TILE))), parts
