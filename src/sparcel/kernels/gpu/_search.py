"""Binary search in sorted numbers, and lists of the places that were kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.errors import InputError
from sparcel.kernels.definitions.common import index_dtype
from sparcel.kernels.gpu._launch import launch

BLOCK = 512
"""Entries that one program takes: few, so that what it knows of them stays in registers."""


@triton.jit
def lower_bound(numbers, low, high, wanted, steps):
    """Return the first places in ``[low, high)`` whose numbers are not less than ``wanted``.

    Without such a place it is ``high``. A range of n places takes as many steps as n has bits.
    What is not sorted gives wrong places, but none outside of the range.
    """
    for _ in range(steps):
        searching = low < high
        middle = low + (high - low) // 2
        less = tl.load(numbers + middle, mask=searching, other=0) < wanted
        low = tl.where(searching & less, middle + 1, low)
        high = tl.where(searching & (less == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["size"])
def _count(kept, counts, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    passed = tl.load(kept + place, mask=place < size, other=0) != 0
    tl.store(counts + program, tl.sum(passed.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["size"])
def _list(kept, before, places, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    passed = tl.load(kept + place, mask=place < size, other=0) != 0
    start = tl.load(before + program - 1, mask=program > 0, other=0)
    slot = start + tl.cumsum(passed.to(tl.int32), axis=0) - 1
    tl.store(places + slot, place.to(places.dtype.element_ty), mask=passed)


def places_of(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places where ``kept`` (int8, at least one entry) is not 0, and their number.

    There is memory for as many places as ``kept`` has entries; the number, int64 ``[1]``, stays on
    the device.
    """
    size = kept.numel()
    programs = programs_for(size)
    counts = kept.new_empty(programs, dtype=torch.int32)
    places = kept.new_empty(size, dtype=index_dtype(size))
    launch(_count, programs, kept, counts, size, BLOCK=BLOCK)
    before = counts.cumsum(0)
    launch(_list, programs, kept, before, places, size, BLOCK=BLOCK)
    return places, before[-1:]


def programs_for(entries: int) -> int:
    """Return how many programs take so many entries."""
    return -(-entries // BLOCK)


def check_rows(indices: Tensor, values: Tensor) -> None:
    """Raise `InputError` unless there is a value or a row for each index."""
    if values.shape[:1] != indices.shape:
        raise InputError("each index needs its value or row")
