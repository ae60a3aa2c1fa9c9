"""MSTopK: bisection of the threshold, then a random slice of what lies between the last two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel.selectors.base import Selector, check_setting, stream_of
from sparcel.selectors.draws import integers
from sparcel.selectors.thresholds import Counts, at_least, joined, moments, peak
from sparcel.stream import SparseStream


@dataclass(eq=False)
class MSTopK(Selector):
    """Exactly min(k, nnz) coordinates, nearly those of largest magnitude.

    The threshold is bisected between the mean and the largest magnitude. All coordinates above
    the lowest threshold that lets k or fewer through are selected; the rest of the k are
    consecutive ones, from a random place on, of those above the highest threshold that lets more
    than k through. Each sampling halves the distance of the two thresholds, so all but the
    coordinates within ``(max − mean) / 2**samplings`` of the k-th magnitude are the exact ones.

    Parameters
    ----------
    samplings
        How often to halve; the paper's N.
    seed
        Decides, with the step, where the random slice begins.

    Source: CommLib, Algorithm 1. Deviations: a threshold that was never found stands
    for none, where the published one is 0 and, with no sampling at k or below, would select
    everything; zeros are never selected; probes are answered from histograms of the magnitudes'
    bits, so the vector is read a few times and not once for each.
    """

    samplings: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        check_setting("samplings", self.samplings, 1)

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Bisect, and cut the slice."""
        counts = Counts(x)
        low, high = self._bisect(x, k, counts)
        surely = counts.at_least(high) if high is not None else 0
        between = counts.at_least(low) - surely
        needed = min(k - surely, between)
        start = int(integers(1, between - needed + 1, self.seed, step, torch.device("cpu")))
        parts, passed = [], 0
        for indices, values in at_least(x, low):
            kept = _reaching(values, high)
            number = torch.cumsum(~kept, 0) + (passed - 1)  # of each one between, from 0
            passed += int((~kept).sum())
            kept |= (number >= start) & (number < start + needed) & ~kept
            parts.append((indices[kept], values[kept]))
        return stream_of(*joined(parts, x), x)

    def _bisect(self, x: Tensor, k: int, counts: Counts) -> tuple[float, float | None]:
        """Return the last threshold with more than k, 0 if none, and the last with k or fewer."""
        mean, largest = moments(x)[2], peak(x)
        low, high = 0.0, None
        left, right = 0.0, 1.0
        for _ in range(self.samplings):
            ratio = left + (right - left) / 2
            threshold = mean + ratio * (largest - mean)
            if counts.more_than(k, threshold):
                left, low = ratio, threshold
            else:
                right, high = ratio, threshold
        return low, high


def _reaching(values: Tensor, threshold: float | None) -> Tensor:
    """Tell which magnitudes are at least the threshold, as `kernels.threshold_select` has it."""
    if threshold is None:
        return torch.zeros_like(values, dtype=torch.bool)
    return values.abs() >= torch.tensor(threshold, dtype=values.dtype, device=values.device)
