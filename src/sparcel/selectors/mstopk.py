"""MSTopK: bisects the threshold, then fills up from a random slice of the undecided magnitudes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel._checks import whole_number
from sparcel.selectors.base import Selector, stream_of
from sparcel.selectors.draws import integers
from sparcel.selectors.thresholds import Counts, at_least, joined, moments, peak
from sparcel.stream import SparseStream


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
    selected. Samplings are counted in histograms of the magnitudes' bits, so the vector is read a
    few times instead of once for each sampling.
    """

    samplings: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        self.samplings = whole_number(self.samplings, "samplings", at_least=1)
        self.seed = whole_number(self.seed, "seed")

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Bisect the threshold, and fill up from the slice."""
        counts = Counts(x)
        low, high = self._bisect(x, k, counts)
        above = counts.at_least(high)
        between = counts.at_least(low) - above
        needed = min(k - above, between)
        start = int(integers(1, between - needed + 1, self.seed, step, torch.device("cpu")))
        limit = torch.tensor(high, dtype=x.dtype, device=x.device)
        parts, passed = [], 0
        for indices, values in at_least(x, low):
            surely = values.abs() >= limit
            number = torch.cumsum(~surely, 0) + (passed - 1)  # of those between, from 0
            passed += int((~surely).sum())
            kept = surely | ((number >= start) & (number < start + needed))
            parts.append((indices[kept], values[kept]))
        return stream_of(*joined(parts, x), x)

    def _bisect(self, x: Tensor, k: int, counts: Counts) -> tuple[float, float]:
        """Return the last threshold with more than k, else 0; the last with up to k, else inf."""
        mean, largest = moments(x)[2], peak(x)
        low, high = 0.0, math.inf
        left, right = 0.0, 1.0
        for _ in range(self.samplings):
            ratio = left + (right - left) / 2
            threshold = mean + ratio * (largest - mean)
            if counts.more_than(k, threshold):
                left, low = ratio, threshold
            else:
                right, high = ratio, threshold
        return low, high
