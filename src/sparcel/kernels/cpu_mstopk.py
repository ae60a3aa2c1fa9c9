"""MSTopK on the CPU: all samplings are decided by the k + 1 largest magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sparcel.kernels import cpu
from sparcel.kernels.definitions.common import index_dtype
from sparcel.kernels.definitions.mstopk import mean_magnitude, part_length, rounded

_SPARE = 64
"""How many magnitudes beyond the k + 1 largest are looked up at first."""


def mstopk(x: Tensor, k: int, samplings: int, place: Callable[[int], int]) -> tuple[Tensor, Tensor]:
    # A few more than k + 1 mostly reach below `low`.
    indices, values = cpu.topk(x, k + 1 + _SPARE)
    if values.numel() == 0:
        return indices, values
    low, high = _bisect(x, k, samplings, values)
    complete = values.numel() <= k + _SPARE or float(values.abs().min()) < rounded(low, x)

    def candidates() -> Iterator[tuple[Tensor, Tensor]]:
        return iter([reaching(indices, values, low)]) if complete else at_least(x, low)

    limit = torch.tensor(high, dtype=x.dtype, device="cpu")
    above = int((values.abs() >= limit).sum())
    between = sum(found.numel() for _, found in candidates()) - above
    needed = min(k - above, between)
    start = place(between - needed + 1)
    parts, passed = [], 0
    for places, found in candidates():
        surely = found.abs() >= limit
        number = torch.cumsum(~surely, 0) + (passed - 1)  # of those between, from 0
        passed += int((~surely).sum())
        kept = surely | ((number >= start) & (number < start + needed))
        parts.append((places[kept], found[kept]))
    chosen, selected = (torch.cat(part) for part in zip(*parts, strict=True))
    return chosen, selected


def _bisect(x: Tensor, k: int, samplings: int, largest: Tensor) -> tuple[float, float]:
    """Return the last threshold with more than k, else 0; the last with up to k, else inf.

    ``largest`` holds the k + 1 largest magnitudes of ``x``, and maybe more.
    """
    peak, next_largest = float(largest.abs().max()), nth_largest(largest, k + 1)
    mean = mean_magnitude(x, peak)
    low, high = 0.0, math.inf
    left, right = 0.0, 1.0
    for _ in range(samplings):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (peak - mean)
        if next_largest > 0 and next_largest >= rounded(threshold, x):
            left, low = ratio, threshold
        else:
            right, high = ratio, threshold
    return low, high


def reaching(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the entries whose magnitude is at least ``threshold``, rounded to their dtype."""
    positions, values = cpu.threshold_select(values, threshold)
    return indices.index_select(0, positions), values


def at_least(x: Tensor, threshold: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices and values of the magnitudes of at least ``threshold``, block by block.

    What it allocates is smaller than ``x``, however many there are.
    """
    start = 0
    for part in x.split(part_length(x)):
        positions, values = cpu.threshold_select(part, threshold)
        yield positions.to(index_dtype(x.numel())) + start, values
        start += part.numel()


def nth_largest(values: Tensor, n: int) -> float:
    """Return the ``n``-th largest magnitude, from 1; 0 if there are not so many nonzeros."""
    _, largest = cpu.topk(values, n)
    return float(largest.abs().min()) if largest.numel() == n else 0.0
