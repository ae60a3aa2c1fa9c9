"""MSTopK: bisects the threshold, then fills up from a slice of the undecided magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparcel.kernels.definitions.common import index_dtype

BLOCK = 2**15
"""Coordinates in a block; torch sums this many in the same order on every machine."""


def mstopk(x: Tensor, k: int, samplings: int, place: Callable[[int], int]) -> tuple[Tensor, Tensor]:
    """Select k nearly largest magnitudes, by a threshold that is halved again and again.

    Parameters
    ----------
    x
        Dense vector ``[n]``, any float dtype, finite.
    k
        At least 1.
    samplings
        How often to compare a threshold between the mean and the largest magnitude with the vector.
        The last one that more than k magnitudes reach is kept, and the last that k or fewer reach.
    place
        Of the n magnitudes between these two, some consecutive ones fill up the k. Called with the
        number of places where these can begin, it returns one of them, from 0.

    Returns
    -------
    indices, values
        ``[min(k, nnz)]`` each.

    Source: CommLib, Algorithm 1.
    """
    magnitudes = x.abs()
    peak = float(magnitudes.max()) if x.numel() else 0.0
    low, high, left, right = 0.0, math.inf, 0.0, 1.0
    mean = mean_magnitude(x, peak) if peak else 0.0
    for _ in range(samplings):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (peak - mean)
        if int(((magnitudes >= rounded(threshold, x)) & (x != 0)).sum()) > k:
            left, low = ratio, threshold
        else:
            right, high = ratio, threshold
    surely = magnitudes >= rounded(high, x)
    between = (magnitudes >= rounded(low, x)) & (x != 0) & ~surely
    there = int(between.sum())
    needed = min(k - int(surely.sum()), there)
    start = place(there - needed + 1)
    number = between.cumsum(0) - 1
    kept = surely | (between & (number >= start) & (number < start + needed))
    positions = kept.nonzero().view(-1)
    return positions.to(index_dtype(x.numel())), x[positions]


def rounded(threshold: float, x: Tensor) -> float:
    """Return a threshold as the dtype of ``x`` holds it."""
    return float(torch.tensor(threshold, dtype=x.dtype, device="cpu"))


def mean_magnitude(x: Tensor, peak: float) -> float:
    """Return the mean magnitude of a vector; ``peak`` is its largest magnitude, above 0."""
    wide = torch.promote_types(x.dtype, torch.float32)
    memory, total = torch.empty(part_length(x), dtype=wide, device=x.device), 0.0
    for part in x.split(part_length(x)):
        # Sums of the magnitudes themselves might overflow.
        scaled = torch.div(part.to(wide), peak, out=memory[: part.numel()])
        total += _sum(scaled.abs_())
    return total / x.numel() * peak


def part_length(x: Tensor) -> int:
    """Return the length of the parts in which a vector is read; a long vector has about 64."""
    return max(BLOCK, x.numel() // 64)


def _sum(part: Tensor) -> float:
    """Return the sum of a vector: blocks in its dtype, and the blocks' sums in float64."""
    whole = part.numel() // BLOCK * BLOCK
    sums = part[:whole].view(-1, BLOCK).sum(dim=1)
    return float(sums.double().sum()) + float(part[whole:].sum())
