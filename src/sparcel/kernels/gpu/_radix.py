"""Radix select: the k-th largest magnitude of a vector, from histograms of its bits."""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.gpu._bits import bits_width, magnitude_bits
from sparcel.kernels.gpu._compact import AT_ABOVE, AT_ROOM, AT_TIES, RULE_LENGTH
from sparcel.kernels.gpu._launch import launch

FIELD = 11
BINS = 1 << FIELD
"""The most bits that a histogram tells apart, and its length."""
LENGTH = tl.constexpr(BINS)
"""The same, for kernels."""
TILE = 1024
_MANY = 1 << 20
"""From so many entries on, a program counts several tiles before it adds to the common counts."""


@triton.jit
def count_field(bits, counted, shift, field):
    """Return how often each value of a field of the bits occurs."""
    value = ((bits >> shift) & ((1 << field) - 1)).to(tl.int32)
    return tl.histogram(value, LENGTH, mask=counted)


@triton.jit
def add_counts(counts, found):
    """Add to common counts, in any order."""
    bins = tl.arange(0, LENGTH)
    tl.atomic_add(counts + bins, found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit
def descend(counts, needed, field):
    """Return the value of the ``needed``-th largest, and how many are needed of this value.

    All that there are if these are fewer. If none is needed, the largest value.
    """
    bins = tl.arange(0, LENGTH)
    found = tl.load(counts + bins)
    needed = tl.minimum(needed, tl.sum(found, axis=0))
    reaching = tl.cumsum(found, axis=0, reverse=True)
    place = tl.sum((reaching >= needed).to(tl.int32), axis=0) - 1
    place = tl.minimum(place, (1 << field) - 1)
    larger = tl.sum(tl.where(bins > place, found, 0), axis=0)
    return place.to(tl.int64), needed - larger


@triton.jit(do_not_specialize=["level", "before", "field", "shift", "k"])
def _count_level(
    x, size, limit, threshold, path, histograms, k, level, before, field, shift,
    LIMITED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count one field, of the magnitudes whose upper bits are those of the k-th largest.

    ``path`` holds the upper bits and how many are needed, before each level; ``before`` is the
    field of the level before this one.
    """
    program = tl.program_id(0).to(tl.int64)
    needed = k.to(tl.int64)
    if LIMITED:
        passed = tl.load(limit)
        # If all nonzeros passed, fewer than k are all that there are.
        fit = (passed <= size) & ((passed >= k) | (tl.load(threshold) == 0))
        needed = tl.where(fit, needed, 0)
        size = tl.minimum(passed, size)
    prefix = needed * 0
    if level > 0:
        place, needed = descend(
            histograms + (level - 1) * LENGTH, tl.load(path + 2 * level - 1), before
        )
        prefix = (tl.load(path + 2 * level - 2) << before) | place
    if program == 0:
        tl.store(path + 2 * level, prefix)
        tl.store(path + 2 * level + 1, needed)
    found = tl.zeros((LENGTH,), tl.int32)
    for part in range(PARTS):
        place = (program * PARTS + part) * TILE + tl.arange(0, TILE)
        bits = magnitude_bits(tl.load(x + place, mask=place < size, other=0.0))
        # There are no bits above the first field.
        counted = (bits != 0) & ((bits >> (shift + field)) == prefix)
        found += count_field(bits, counted, shift, field)
    add_counts(histograms + level * LENGTH, found)


@triton.jit(do_not_specialize=["level", "field"])
def _conclude(path, histograms, rule, level, field):
    """Write the rule by which the k largest pass."""
    above = tl.load(path + 2 * level)
    place, needed = descend(histograms + level * LENGTH, tl.load(path + 2 * level + 1), field)
    kth = (above << field) | place
    tl.store(rule + AT_ABOVE, kth)
    tl.store(rule + AT_TIES, kth - 1)
    tl.store(rule + AT_ROOM, needed)


def write_rule(
    x: Tensor, k: int, rule: Tensor, passed: tuple[Tensor, Tensor] | None = None
) -> None:
    """Let ``rule`` pass the min(k, nonzeros) largest of a vector, ties by lowest index.

    Parameters
    ----------
    k
        At least 0.
    passed
        int64 ``[]`` both: how many entries ``x`` has, those that passed a threshold, and the bits
        above which they did. If these are fewer than ``k`` and the threshold was not 0, or more
        than there is memory for, nothing passes.
    """
    assert rule.numel() == RULE_LENGTH
    width = bits_width(x.dtype)
    fields = [min(FIELD, width - start) for start in range(0, width, FIELD)]
    shifts = [width - end for end in accumulate(fields)]
    path = x.new_zeros(2 * len(fields) + len(fields) * BINS, dtype=torch.int64)
    histograms = path[2 * len(fields) :]
    programs, parts = parted(x.numel())
    for level, (field, shift) in enumerate(zip(fields, shifts, strict=True)):
        launch(
            _count_level, programs, x, x.numel(), *(passed or (rule, rule)), path,
            histograms, k, level, fields[level - 1], field, shift,
            LIMITED=passed is not None, PARTS=parts, TILE=TILE,
        )  # fmt: skip
    launch(_conclude, 1, path, histograms, rule, len(fields) - 1, fields[-1])


def parted(size: int) -> tuple[int, int]:
    """Return how many programs count a vector, at least one, and how many tiles each."""
    parts = 16 if size >= _MANY else 1
    return max(1, -(-size // (parts * TILE))), parts
