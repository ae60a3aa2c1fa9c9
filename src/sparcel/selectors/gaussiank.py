"""Gaussian-k: the threshold that lets k through if the vector is normally distributed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from sparcel import kernels
from sparcel._checks import number
from sparcel.selectors.base import Selector, stream_of
from sparcel.selectors.thresholds import mean_and_deviation, nth_largest, reaching, rounded
from sparcel.stream import SparseStream


@dataclass(eq=False)
class GaussianK(Selector):
    """More than 3k/4 and at most ⌈4k/3⌉ coordinates, those of largest magnitude.

    That is so unless ``factor`` is None. If there are fewer nonzeros, all of them. The threshold is
    ``|mean| + z·std``, where a share of k/size of a standard normal distribution lies outside of
    ±z. It is multiplied by ``factor`` until more than 3k/4 pass. If more than ⌈4k/3⌉ pass, the
    largest are taken, ties to the lowest index.

    Parameters
    ----------
    factor
        What the threshold is multiplied with when too few pass, in [0, 0.99]. None leaves the
        threshold as it is, for comparisons: any number of coordinates may then reach it.

    Source: Shi et al. 2019a; the scaling up to 3k/4 is Ok-Topk's, section 5.4. Deviation: the cap.
    Shi et al. raise the threshold if more than 4k/3 pass, but only a few times, so nothing is
    bounded.
    """

    factor: float | None = 0.9

    def __post_init__(self) -> None:
        if self.factor is not None:
            self.factor = number(self.factor, "factor", at_least=0, at_most=0.99)

    def most(self, k: int, size: int) -> int:
        """Return ⌈4k/3⌉, or the size; always the size if ``factor`` is None."""
        return size if self.factor is None else min(-(-4 * k // 3), size)

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Estimate the threshold, lower it until enough pass, and select."""
        if self.factor is None:
            indices, values = kernels.threshold_select(x, _estimate(x, k, nth_largest(x, 1)))
            return stream_of(indices.to(kernels.index_dtype(x.numel())), values, x)
        indices, values = kernels.topk(x, self.most(k, x.numel()))
        if values.numel() == 0:
            return stream_of(indices, values, x)
        threshold = _estimate(x, k, float(values.abs().max()))
        # More than 3k/4 pass if this magnitude does.
        last = nth_largest(values, 3 * k // 4 + 1)
        if last == 0:
            threshold = 0.0
        while not (threshold == 0 or last >= rounded(threshold, x)):
            # The product may round back to the same number if that is very small.
            threshold = min(threshold * self.factor, math.nextafter(threshold, 0))
        return stream_of(*reaching(indices, values, threshold), x)


def _estimate(x: Tensor, k: int, peak: float) -> float:
    """Return the threshold for ``k`` of normally distributed values; ``peak`` is the largest."""
    if peak == 0:
        return 0.0
    mean, deviation = mean_and_deviation(x, peak)
    z = -NormalDist().inv_cdf(min(k / x.numel(), 1) / 2)
    return abs(mean) + z * deviation
