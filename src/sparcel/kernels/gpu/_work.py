"""The memory that a selection's kernels share: what passes, how many do, and their magnitudes.

It is one tensor, int64, that begins as zeros. First come two rules, for what passes a threshold and
for what is selected; then the way to the k-th largest and the histograms on it (see `_radix`); then
how many pass of each group of spans, of each kind.

Kernels get its places from functions that have them as literals: Triton compares all global numbers
of a kernel at each launch, which takes the host as long as two arguments do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.gpu._bits import bits_width

FIELD = 11
BINS = 1 << FIELD
"""The most bits that a histogram tells apart, and its length."""

SPAN = 8192
"""Entries of a vector that one program marks or emits."""
GROUP = 128
"""Spans that are counted together."""

FAULT, ABOVE, PASSED, ROOM, TIED = range(5)
"""The places of a rule.

Entries whose magnitudes have more than the bits ABOVE pass; PASSED is how many. Of the TIED ones
whose magnitudes have just these bits the first ROOM pass, too. FAULT is 1 if the sum is not finite.
"""
RULE_LENGTH = 8
_HEAD = 4 * RULE_LENGTH
"""Numbers before the histograms: two rules, and a path of up to 2 * 6."""
_KINDS = 4
"""Counts of a group: what passes the threshold (0), what is above the k-th (1), its equals (2)."""


def levels_of(dtype: torch.dtype) -> int:
    """Return how many histograms lead to a magnitude of a dtype."""
    return -(-bits_width(dtype) // FIELD)


def spans_of(size: int) -> int:
    """Return how many spans a vector has."""
    return -(-size // SPAN)


def groups_length(spans: int) -> int:
    """Return how many numbers hold the counts of groups of so many spans."""
    return _KINDS * -(-spans // GROUP)


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
def path_at(work, LEVEL: tl.constexpr):
    """Return where the upper bits before a level are; how many are needed follows."""
    return work + 16 + 2 * LEVEL


@triton.jit
def histogram_at(work, LEVEL: tl.constexpr):
    return work + 32 + 2048 * LEVEL


@triton.jit
def groups_at(work, WIDTH: tl.constexpr, FIELD: tl.constexpr):
    """Return where the counts of groups are, for magnitudes of ``WIDTH`` bits."""
    return histogram_at(work, (WIDTH + FIELD - 1) // FIELD)


@triton.jit
def add_span(groups, kind, total, counts, span, count, GROUP: tl.constexpr):
    """Write the count of a span, and add it to that of its group and to the total."""
    tl.store(counts + span, count)
    tl.atomic_add(groups + span // GROUP * 4 + kind, count.to(tl.int64), sem="relaxed")
    tl.atomic_add(total, count.to(tl.int64), sem="relaxed")


@triton.jit
def before_span(groups, kind, counts, span, GROUP: tl.constexpr):
    """Return the sum of the counts of the spans before one."""
    group, number = span // GROUP, tl.arange(0, GROUP)
    sums = tl.zeros((GROUP,), tl.int64)
    for first in range(0, group, GROUP):
        place = first + number
        sums += tl.load(groups + place * 4 + kind, mask=place < group, other=0)
    place = group * GROUP + number
    sums += tl.load(counts + place, mask=place < span, other=0).to(tl.int64)
    return tl.sum(sums, axis=0)
