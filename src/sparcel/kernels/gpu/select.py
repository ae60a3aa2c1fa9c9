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

from sparcel import device
from sparcel.kernels.addition import Addition
from sparcel.kernels.definitions.common import index_dtype
from sparcel.kernels.definitions.common import magnitude_bits as magnitude_bits_of
from sparcel.kernels.definitions.select import bracket_of
from sparcel.kernels.gpu._bits import bits_of, magnitude_bits
from sparcel.kernels.gpu._compact import emit, mark_largest
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.gpu._radix import TILE, add_counts, count_field, find_kth, no_counts, parted
from sparcel.kernels.gpu._rows import largest_of_chunks
from sparcel.kernels.gpu._search import lower_bound
from sparcel.kernels.gpu._sum import accumulate, mark, sample, sum_of, vector_alone
from sparcel.kernels.gpu._work import (
    ABOVE,
    BINS,
    FAULT,
    FIELD,
    PASSED,
    ROOM,
    RULE_LENGTH,
    TIED,
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


class _Begun(NamedTuple):
    """A selection that is queued: memory for k entries, and what tells how many there are.

    ``plan`` is None where all entries of the vector were candidates.
    """

    indices: Tensor
    values: Tensor
    work: Tensor
    plan: _Plan | None

    def ended(self) -> tuple[tuple[Tensor, Tensor] | None, bool]:
        """Wait for the selection, and whether the vector was finite.

        The former is None if too few or too many passed the threshold.
        """
        numbers = device.read(self.work[: 2 * RULE_LENGTH]).tolist()
        threshold, selected = numbers[:RULE_LENGTH], numbers[RULE_LENGTH:]
        passed, finite = threshold[PASSED], not threshold[FAULT]
        taken = selected[PASSED] + min(selected[TIED], selected[ROOM])
        enough = passed >= self.values.numel() or threshold[ABOVE] == 0
        if self.plan and not (enough and passed <= self.plan.capacity):
            return None, finite
        return (self.indices[:taken], self.values[:taken]), finite


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    plan, marks = _Plan.of(k, x.numel()), None
    work = _work(x, plan)
    if plan:
        sample(vector_alone(x), work, SAMPLES, plan.rank)
        marks = mark(x, work)
    found, _ = _continue(x, k, work, plan, marks).ended()
    return found or _from_all(x, k)


def topk_chunked(x: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    if chunk >= x.numel() or k == 0:
        return topk(x, k)
    indices, values, count = largest_of_chunks(x, k, chunk)
    taken = int(device.read(count))
    return indices[:taken], values[:taken]


def accumulate_topk(
    addition: Addition, k: int, chunk: int | None = None
) -> tuple[Tensor, Tensor, bool | Tensor]:
    scratch, sum = addition.scratch, sum_of(addition)
    if chunk is not None and chunk < scratch.numel() and k:
        work = _work(scratch)
        accumulate(sum, addition, work, marking=False)
        indices, values, count = largest_of_chunks(scratch, k, chunk, clear=True)
        taken, fault = device.read(torch.cat([count, work[FAULT : FAULT + 1]])).tolist()
        return indices[:taken], values[:taken], not fault
    plan = _Plan.of(k, scratch.numel())
    work = _work(scratch, plan)
    if plan:
        sample(sum, work, SAMPLES, plan.rank)
    marks = accumulate(sum, addition, work, marking=plan is not None)
    if k == 0:
        nothing = scratch.new_empty(0, dtype=index_dtype(scratch.numel()))
        return nothing, scratch[:0], work[FAULT] == 0
    begun = _continue(scratch, k, work, plan, marks, clear=True)
    found, finite = begun.ended()
    if found is None and finite:
        found = _from_all(scratch, k, clear=True)
    return *(found or (begun.indices[:0], begun.values[:0])), finite


def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    work = _work(x)
    work[ABOVE : ABOVE + 1].fill_(max(bits_of(threshold, x.dtype) - 1, 0))
    marks = mark(x, work)
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


def _continue(
    x: Tensor, k: int, work: Tensor, plan: _Plan | None, marks: Tensor | None, clear: bool = False
) -> _Begun:
    """Queue the selection of the k largest of those that passed the threshold, or of all.

    With ``clear`` they are set to 0 in ``x``, unless too few or too many passed.
    """
    k, dtype = min(k, x.numel()), index_dtype(x.numel())
    names, candidates = None, x
    if plan and marks is not None:
        names, candidates = emit(x, marks, work, plan.capacity, dtype, counted=True)
    limited = plan is not None
    find_kth(candidates, k, work, limited)
    marks = mark_largest(candidates, k, work, limited)
    cleared = x if clear else None
    chosen = emit(candidates, marks, work, k, dtype, names, cleared, selected=True)
    return _Begun(*chosen, work, plan)


def _from_all(x: Tensor, k: int, clear: bool = False) -> tuple[Tensor, Tensor]:
    """Return the k largest of a vector without a sample, which may have misled."""
    found, _ = _continue(x, k, _work(x), None, None, clear).ended()
    assert found is not None, "without a threshold nothing misleads"
    return found


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
