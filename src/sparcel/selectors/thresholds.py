"""Thresholds of magnitudes, and the statistics that they are estimated from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparcel import kernels

BLOCK = 2**15
"""Coordinates in a block; torch sums this many in the same order on every machine."""


def reaching(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the entries whose magnitude is at least ``threshold``, rounded to their dtype."""
    positions, values = kernels.threshold_select(values, threshold)
    return indices.index_select(0, positions), values


def at_least(x: Tensor, threshold: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices and values of the magnitudes of at least ``threshold``, block by block.

    What it allocates is smaller than ``x``, however many there are.
    """
    start = 0
    for part in x.split(_length(x)):
        positions, values = kernels.threshold_select(part, threshold)
        yield positions.to(kernels.index_dtype(x.numel())) + start, values
        start += part.numel()


def nth_largest(values: Tensor, n: int) -> float:
    """Return the ``n``-th largest magnitude, from 1; 0 if there are not so many nonzeros."""
    _, largest = kernels.topk(values, n)
    return float(largest.abs().min()) if largest.numel() == n else 0.0


def rounded(threshold: float, x: Tensor) -> float:
    """Return a threshold as the dtype of ``x`` holds it."""
    return float(torch.tensor(threshold, dtype=x.dtype))


def mean_magnitude(x: Tensor, peak: float) -> float:
    """Return the mean magnitude of a vector; ``peak`` is its largest magnitude, above 0."""
    wide = torch.promote_types(x.dtype, torch.float32)
    memory, total = torch.empty(_length(x), dtype=wide, device=x.device), 0.0
    for part in x.split(_length(x)):
        # Sums of the magnitudes themselves might overflow.
        scaled = torch.div(part.to(wide), peak, out=memory[: part.numel()])
        total += _sum(scaled.abs_())
    return total / x.numel() * peak


def _sum(part: Tensor) -> float:
    """Return the sum of a vector: blocks in its dtype, and the blocks' sums in float64."""
    whole = part.numel() // BLOCK * BLOCK
    sums = part[:whole].view(-1, BLOCK).sum(dim=1)
    return float(sums.double().sum()) + float(part[whole:].sum())


def _length(x: Tensor) -> int:
    """Return the length of the parts in which a vector is read; a long vector has about 64."""
    return max(BLOCK, x.numel() // 64)
