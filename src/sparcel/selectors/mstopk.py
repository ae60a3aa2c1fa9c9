"""MSTopK: bisects the threshold, then fills up from a random slice of the undecided magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import whole_number
from sparcel.selectors.base import Selector, stream_of
from sparcel.selectors.draws import integers
from sparcel.selectors.thresholds import (
    at_least,
    mean_magnitude,
    nth_largest,
    reaching,
    rounded,
)
from sparcel.stream import SparseStream

_SPARE = 64
"""How many magnitudes beyond the k + 1 largest are looked up at first."""


@dataclass(eq=False)
class MSTopK(Selector):
    """Exactly min(k, nnz) coordinates, nearly those of largest magnitude.

    The threshold is bisected between the mean and the largest magnitude. This leaves two
    thresholds: the lowest that lets k or fewer through, and the highest that lets more through. All
    coordinates above the former are selected. The rest of the k are taken from those between the
    two: consecutive ones, beginning at a random place. Each sampling halves the distance of the
    thresholds, so only coordinates within ``(max − mean) / 2**samplings`` of the k-th magnitude can
    differ from the exact top-k.

    Parameters
    ----------
    samplings
        How often to halve; the paper's N.
    seed
        Decides, with the step, where the random slice begins.

    Source: CommLib, Algorithm 1. Deviations: if no sampling lets k or fewer through, all k come
    from the slice; the published threshold is then 0 and selects everything. Zeros are never
    selected. A sampling compares its threshold with the (k+1)-th largest magnitude instead of
    counting in the vector, which gives the same answer.
    """

    samplings: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        self.samplings = whole_number(self.samplings, "samplings", at_least=1)
        self.seed = whole_number(self.seed, "seed")

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Bisect the threshold, and fill up from the slice."""
        # The k + 1 largest magnitudes decide every sampling; a few more mostly reach below `low`.
        indices, values = kernels.topk(x, k + 1 + _SPARE)
        if values.numel() == 0:
            return stream_of(indices, values, x)
        low, high = self._bisect(x, k, values)
        complete = values.numel() <= k + _SPARE or float(values.abs().min()) < rounded(low, x)

        def candidates() -> Iterator[tuple[Tensor, Tensor]]:
            return iter([reaching(indices, values, low)]) if complete else at_least(x, low)

        limit = torch.tensor(high, dtype=x.dtype, device=x.device)
        above = int((values.abs() >= limit).sum())
        between = sum(found.numel() for _, found in candidates()) - above
        needed = min(k - above, between)
        start = int(integers(1, between - needed + 1, self.seed, step, torch.device("cpu")))
        parts, passed = [], 0
        for places, found in candidates():
            surely = found.abs() >= limit
            number = torch.cumsum(~surely, 0) + (passed - 1)  # of those between, from 0
            passed += int((~surely).sum())
            kept = surely | ((number >= start) & (number < start + needed))
            parts.append((places[kept], found[kept]))
        chosen, selected = (torch.cat(part) for part in zip(*parts, strict=True))
        return stream_of(chosen, selected, x)

    def _bisect(self, x: Tensor, k: int, largest: Tensor) -> tuple[float, float]:
        """Return the last threshold with more than k, else 0; the last with up to k, else inf.

        ``largest`` holds the k + 1 largest magnitudes of ``x``, and maybe more.
        """
        peak, next_largest = float(largest.abs().max()), nth_largest(largest, k + 1)
        mean = mean_magnitude(x, peak)
        low, high = 0.0, math.inf
        left, right = 0.0, 1.0
        for _ in range(self.samplings):
            ratio = left + (right - left) / 2
            threshold = mean + ratio * (peak - mean)
            if next_largest > 0 and next_largest >= rounded(threshold, x):
                left, low = ratio, threshold
            else:
                right, high = ratio, threshold
        return low, high
