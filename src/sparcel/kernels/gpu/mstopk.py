"""MSTopK on a GPU as published: every sampling reads the vector, and the host reads once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel import device
from sparcel.kernels.definitions.common import index_dtype
from sparcel.kernels.gpu._bits import bits_of, magnitude_bits
from sparcel.kernels.gpu._compact import (
    AT_ABOVE,
    AT_TIES,
    FIRST,
    ROOM,
    RULE_LENGTH,
    emit,
    mark,
)
from sparcel.kernels.gpu._launch import launch

_TILE = 4096

_STATE = 8
"""The numbers that a sampling starts from, float64: the ends of the interval of ratios, the last
threshold that more than k reach and how many do, the last that k or fewer reach and how many do,
the mean and the largest magnitude."""


def mstopk(x: Tensor, k: int, samplings: int, place: Callable[[int], int]) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return x.new_empty(0, dtype=index_dtype(0)), x.new_empty(0)
    states = x.new_zeros(samplings + 1, _STATE, dtype=torch.float64)
    counts = x.new_zeros(samplings, dtype=torch.int64)
    norm = torch.linalg.vector_norm
    peak = norm(x, torch.inf, dtype=torch.float64)
    states[0, 1].fill_(1)
    states[0, 3] = norm(x, 0, dtype=torch.float64).nan_to_num(0)  # of void vectors
    states[0, 4].fill_(torch.inf)
    states[0, 6] = torch.minimum(norm(x, 1, dtype=torch.float64) / x.numel(), peak)
    states[0, 7] = peak
    for sampling in range(samplings):
        launch(
            _sample, -(-x.numel() // _TILE), x, x.numel(), states, counts, k, sampling,
            TILE=_TILE, enable_fp_fusion=False,
        )  # fmt: skip
    rule = x.new_zeros(RULE_LENGTH, dtype=torch.int64)
    launch(
        _conclude, 1, x, states, counts, k, samplings, bits_of(math.inf, x.dtype), rule,
        enable_fp_fusion=False,
    )  # fmt: skip
    reached, above = device.read(states[-1, 3:6:2].contiguous()).long().tolist()
    between = reached - above
    needed = min(k - above, between)
    rule[FIRST].fill_(place(between - needed + 1))
    rule[ROOM].fill_(needed)
    return emit(x, mark(x, rule), rule, above + needed, index_dtype(x.numel()))


@triton.jit
def _limit(threshold, x):
    """Return the bits of a threshold, float64, rounded as torch does to the dtype of ``x``."""
    if x.dtype.element_ty == tl.float64:
        bits = magnitude_bits(threshold)
    else:
        bits = magnitude_bits(threshold.to(tl.float32).to(x.dtype.element_ty))
    return bits


@triton.jit
def _after(states, counts, k, sampling):
    """Return the state after the sampling before this one."""
    before = states + tl.maximum(sampling - 1, 0) * 8
    left, right = tl.load(before), tl.load(before + 1)
    low, low_count = tl.load(before + 2), tl.load(before + 3)
    high, high_count = tl.load(before + 4), tl.load(before + 5)
    mean, peak = tl.load(before + 6), tl.load(before + 7)
    if sampling > 0:
        count = tl.load(counts + sampling - 1)
        ratio = left + (right - left) * 0.5
        threshold = mean + ratio * (peak - mean)
        more = count > k
        left, right = tl.where(more, ratio, left), tl.where(more, right, ratio)
        low, high = tl.where(more, threshold, low), tl.where(more, high, threshold)
        low_count = tl.where(more, count.to(tl.float64), low_count)
        high_count = tl.where(more, high_count, count.to(tl.float64))
    return left, right, low, low_count, high, high_count, mean, peak


@triton.jit
def _store(states, sampling, left, right, low, low_count, high, high_count, mean, peak):
    state = states + sampling * 8
    tl.store(state, left)
    tl.store(state + 1, right)
    tl.store(state + 2, low)
    tl.store(state + 3, low_count)
    tl.store(state + 4, high)
    tl.store(state + 5, high_count)
    tl.store(state + 6, mean)
    tl.store(state + 7, peak)


@triton.jit
def _sample(x, size, states, counts, k, sampling, TILE: tl.constexpr):
    """Count the magnitudes that reach the threshold in the middle."""
    tile = tl.program_id(0).to(tl.int64)
    left, right, low, low_count, high, high_count, mean, peak = _after(states, counts, k, sampling)
    if tile == 0:
        _store(states, sampling, left, right, low, low_count, high, high_count, mean, peak)
    threshold = mean + (left + (right - left) * 0.5) * (peak - mean)
    place = tile * TILE + tl.arange(0, TILE)
    bits = magnitude_bits(tl.load(x + place, mask=place < size, other=0.0))
    limit = _limit(threshold, x)
    reaching = tl.sum(((bits >= limit) & (bits != 0)).to(tl.int32), axis=0)
    tl.atomic_add(counts + sampling, reaching.to(tl.int64), sem="relaxed")


@triton.jit
def _conclude(x, states, counts, k, samplings, infinite, rule):
    """Write the rule by which all that reach the upper threshold pass, and some of the others."""
    left, right, low, low_count, high, high_count, mean, peak = _after(states, counts, k, samplings)
    _store(states, samplings, left, right, low, low_count, high, high_count, mean, peak)
    upper = _limit(high, x).to(tl.int64)
    lower = _limit(low, x).to(tl.int64)
    tl.store(rule + AT_ABOVE, tl.maximum(tl.minimum(upper, infinite) - 1, 0))
    tl.store(rule + AT_TIES, tl.maximum(lower - 1, 0))
