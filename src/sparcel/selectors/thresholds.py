"""Thresholds of magnitudes, and the statistics that they are estimated from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparcel import kernels

BLOCK = 2**16
"""Coordinates in a block; torch sums this many in the same order on every machine."""


def reaching(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the entries whose magnitude is at least ``threshold``, rounded to their dtype."""
    positions, values = kernels.threshold_select(values, threshold)
    return indices.index_select(0, positions), values


def at_least(x: Tensor, threshold: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices and values of the magnitudes of at least ``threshold``, block by block.

    What it allocates is smaller than ``x``, however many there are.
    """
    length = max(BLOCK, x.numel() // 64)
    for start in range(0, x.numel(), length):
        positions, values = kernels.threshold_select(x[start : start + length], threshold)
        yield positions.to(kernels.index_dtype(x.numel())) + start, values


def nth_largest(values: Tensor, n: int) -> float:
    """Return the ``n``-th largest magnitude, from 1; 0 if there are not so many nonzeros."""
    _, largest = kernels.topk(values, n)
    return float(largest.abs().min()) if largest.numel() == n else 0.0


def rounded(threshold: float, x: Tensor) -> float:
    """Return a threshold as the dtype of ``x`` holds it."""
    return float(torch.tensor(threshold, dtype=x.dtype))


def mean_magnitude(x: Tensor, peak: float) -> float:
    """Return the mean magnitude of a vector; ``peak`` is its largest magnitude, above 0."""
    total = sum(float(block.abs_().sum()) for block in _scaled(x, peak))
    return total / x.numel() * peak


def mean_and_deviation(x: Tensor, peak: float) -> tuple[float, float]:
    """Return mean and standard deviation of a vector; see `mean_magnitude`."""
    total = squares = 0.0
    for block in _scaled(x, peak):
        total += float(block.sum())
        squares += float(torch.dot(block, block))
    mean = total / x.numel()
    deviation = max(0.0, squares / x.numel() - mean * mean) ** 0.5
    return mean * peak, deviation * peak


def _scaled(x: Tensor, peak: float) -> Iterator[Tensor]:
    """Yield consecutive parts of ``x / peak``, whose squares neither overflow nor vanish.

    Half precision becomes float32. All parts share their memory.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    buffer = torch.empty(min(BLOCK, x.numel()), dtype=wide, device=x.device)
    for block in x.split(BLOCK):
        yield buffer[: block.numel()].copy_(block).div_(peak)
