"""Compare magnitudes with thresholds, block by block, without allocating a vector's size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from sparcel import kernels
from sparcel.kernels.reference import magnitude_bits

BLOCK = 2**15
"""Coordinates in a block; torch sums this many in the same order on every machine."""

# How the bits of a magnitude are cut into fields, from the top; each takes one histogram.
_FIELDS = {2: (8, 7), 4: (11, 10, 10), 8: (11, 13, 13, 13, 13)}


def blocks(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Return consecutive parts of ``x``, each with its first coordinate."""
    length = max(BLOCK, x.numel() // 64)
    for start in range(0, x.numel(), length):
        yield start, x[start : start + length]


def at_least(x: Tensor, threshold: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices and values of the magnitudes of at least ``threshold``, block by block."""
    for start, block in blocks(x):
        positions, values = kernels.threshold_select(block, threshold)
        yield positions.to(kernels.index_dtype(x.numel())) + start, values


def joined(parts: list[tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate what `at_least` returned."""
    if not parts:
        return torch.empty(0, dtype=kernels.index_dtype(x.numel()), device=x.device), x[:0]
    return torch.cat([indices for indices, _ in parts]), torch.cat([values for _, values in parts])


def no_more_than(cap: int, x: Tensor, threshold: float) -> tuple[Tensor, Tensor] | None:
    """Return all magnitudes of at least ``threshold``, or None if there are more than ``cap``."""
    parts, found = [], 0
    for part in at_least(x, threshold):
        parts.append(part)
        found += part[1].numel()
        if found > cap:
            return None
    return joined(parts, x)


def largest(cap: int, x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the magnitudes of at least ``threshold``, but at most the ``cap`` largest.

    Takes one pass over the vector, and a second one if the cap applies.
    """
    selected = no_more_than(cap, x, threshold)
    return kernels.topk(x, cap) if selected is None else selected


def peak(x: Tensor) -> float:
    """Return the largest magnitude, 0 for an empty vector."""
    if x.numel() == 0:
        return 0.0
    low, high = torch.aminmax(x)
    return max(-float(low), float(high))


def moments(x: Tensor) -> tuple[float, float, float]:
    """Return mean, standard deviation and mean magnitude.

    The vector is scaled by its peak, so that no square overflows or vanishes. Blocks are summed in
    the vector's dtype, half precision in float32, and the blocks' sums in float64.
    """
    scale = peak(x)
    if scale == 0:
        return 0.0, 0.0, 0.0
    wide = torch.promote_types(x.dtype, torch.float32)
    total = squares = magnitudes = 0.0
    for block in x.split(BLOCK):
        scaled = block.to(wide).div(scale)
        total += float(scaled.sum())
        magnitudes += float(scaled.abs_().sum())
        squares += float(scaled.square_().sum())
    size = x.numel()
    mean = total / size
    deviation = max(0.0, squares / size - mean * mean) ** 0.5
    return mean * scale, deviation * scale, magnitudes / size * scale


class Counts:
    """Counts the magnitudes of a vector that are at least a threshold, for many thresholds.

    The vector is read once for each histogram of its bits that a threshold needs, not once for each
    threshold. Thresholds are rounded to the vector's dtype; zeros are not counted.
    """

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._fields = _FIELDS[x.element_size()]
        self._seen: dict[tuple[int, int], list[int]] = {}

    def at_least(self, threshold: float) -> int:
        """Return how many magnitudes are at least ``threshold``."""
        return next(low for low, high in self._bounds(threshold) if low == high)

    def more_than(self, k: int, threshold: float) -> bool:
        """Tell whether more than ``k`` magnitudes are at least ``threshold``.

        For one k, all thresholds together take at most one pass for each field of bits.
        """
        return next(low > k for low, high in self._bounds(threshold) if low > k or high <= k)

    def _bounds(self, threshold: float) -> Iterator[tuple[int, int]]:
        """Yield bounds on the count; each field of bits tightens them, the last is exact."""
        limit = torch.tensor([threshold], dtype=self._x.dtype)
        bits = int(magnitude_bits(limit))
        below = sum(self._fields)
        surely = 0
        for level, width in enumerate(self._fields):
            prefix, below = bits >> below, below - width
            from_bin = self._from_bin(level, prefix)
            field = bits >> below & (2**width - 1)
            above, within = surely + from_bin[field + 1], surely + from_bin[field]
            # In the last field each bin holds a single magnitude.
            yield (above if below else within), within
            surely = above

    def _from_bin(self, level: int, prefix: int) -> list[int]:
        """Count the entries from each bin upwards whose higher bits are ``prefix``."""
        if (level, prefix) not in self._seen:
            below = sum(self._fields[level + 1 :])
            bins = 2 ** self._fields[level]
            given = prefix if level else None
            histogram = kernels.magnitude_histogram(self._x, below, bins, given).tolist()
            self._seen[level, prefix] = [*accumulate(reversed(histogram), initial=0)][::-1]
        return self._seen[level, prefix]
