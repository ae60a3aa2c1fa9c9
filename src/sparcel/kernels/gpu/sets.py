"""Differences and intersections of sparse vectors on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel import device
from sparcel.errors import InputError
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.gpu._search import BLOCK, check_rows, lower_bound, places_of, programs_for


def within(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    return _filtered(indices, values.detach(), others, found=True)


def without(
    indices: Tensor, values: Tensor, others: Tensor, left: int | None = None
) -> tuple[Tensor, Tensor]:
    return _filtered(indices, values.detach(), others, found=False, count=left)


@triton.jit(do_not_specialize=["size", "length", "steps"])
def _keep(indices, others, kept, size, length, steps, FOUND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    index = tl.load(indices + place, mask=there, other=0)
    low = tl.zeros([BLOCK], dtype=tl.int64)
    other = lower_bound(others, low, low + length, index, steps)
    inside = there & (other < length)
    found = inside & (tl.load(others + other, mask=inside, other=0) == index)
    tl.store(kept + place, (found == FOUND).to(tl.int8), mask=there)


def _filtered(
    indices: Tensor, values: Tensor, others: Tensor, found: bool, count: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the entries whose indices are among ``others``, or those that are not.

    The host waits for their number if ``count`` is not it.
    """
    check_rows(indices, values)
    if indices.dtype != others.dtype:
        raise InputError("both lists of indices must have one dtype")
    size, length = indices.numel(), others.numel()
    if size == 0:
        return indices.clone(), values.clone()
    kept = indices.new_empty(size, dtype=torch.int8)
    launch(
        _keep, programs_for(size), indices, others, kept, size, length, length.bit_length(),
        FOUND=found, BLOCK=BLOCK,
    )  # fmt: skip
    places, number = places_of(kept)
    places = places[: int(device.read(number)) if count is None else count]
    return indices.index_select(0, places), values.index_select(0, places)
