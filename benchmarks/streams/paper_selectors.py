"""Selectors of other papers, for comparison: Gaussian-k, and DGC's sampled threshold.

Both papers estimate a threshold, which takes less time than an exact one on a GPU. On a CPU the
exact top-k reads the vector once and is faster than either estimate. So these selectors find the
exact largest magnitudes first, and keep those that the paper's rule would select. They show what
the rules select, not what time they take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from sparcel import SparseStream
from sparcel.core import kernels
from sparcel.core.selectors import Selector
from sparcel.core.selectors.base import integers, reaching, stream_of

SMALLEST_SAMPLE = 512


@dataclass(eq=False)
class GaussianK(Selector):
    """More than 3k/4 and at most ⌈4k/3⌉ coordinates, those of largest magnitude.

    If there are fewer nonzeros, all of them. The threshold is ``|mean| + z·std``, where a share of
    k/size of a standard normal distribution lies outside of ±z. It is multiplied by ``factor``
    until more than 3k/4 pass. If more than ⌈4k/3⌉ pass, the largest are taken, ties to the lowest
    index. If ``factor`` is None, the threshold stays as estimated, and any number may reach it.

    Source: Shi et al. 2019a; the scaling up to 3k/4 is Ok-Topk's, section 5.4. Deviation: the cap.
    Shi et al. raise the threshold if more than 4k/3 pass, but only a few times, so nothing is
    bounded.
    """

    factor: float | None = 0.9

    def most(self, k: int, size: int) -> int:
        return size if self.factor is None else min(-(-4 * k // 3), size)

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        if self.factor is None:
            peak = float(x.abs().max()) if x.numel() else 0.0
            return stream_of(*kernels.threshold_select(x, _estimate(x, k, peak)), x)
        indices, values = kernels.topk(x, self.most(k, x.numel()))
        if values.numel() == 0:
            return stream_of(indices, values, x)
        threshold = _estimate(x, k, float(values.abs().max()))
        # More than 3k/4 pass if this magnitude does.
        passing = kernels.topk(values, 3 * k // 4 + 1)[1]
        last = float(passing.abs().min())
        if passing.numel() <= 3 * k // 4:
            threshold = 0.0
        while not (threshold == 0 or last >= rounded(threshold, x)):
            # The product may round back to the same number if that is very small.
            threshold = min(threshold * self.factor, math.nextafter(threshold, 0))
        return stream_of(*reaching(indices, values, threshold), x)


def rounded(threshold: float, x: Tensor) -> float:
    """Return a threshold as the dtype of ``x`` holds it."""
    return float(torch.tensor(threshold, dtype=x.dtype, device="cpu"))


def _estimate(x: Tensor, k: int, peak: float) -> float:
    """Return the threshold for ``k`` of normally distributed values; ``peak`` is the largest."""
    if peak == 0:
        return 0.0
    # Squares of the values themselves may overflow.
    scaled = x.to(torch.promote_types(x.dtype, torch.float32)) / peak
    deviation, mean = torch.std_mean(scaled, correction=0)
    z = -NormalDist().inv_cdf(min(k / x.numel(), 1) / 2)
    return (abs(float(mean)) + z * float(deviation)) * peak


@dataclass(eq=False)
class DoubleSampling(Selector):
    """The largest magnitudes, between min(0.8·k, nnz) and k of them.

    The threshold selects the same density from a random sample: a share ``sample`` of the
    coordinates, at least 512, decided by ``seed`` and the step. If more than k coordinates pass,
    the exact k largest of them are selected. If fewer than 0.8·k pass, the threshold is lowered to
    that of 1.5 times the density, then of twice the density; if still too few pass, the selection
    is exact.

    Source: DGC (Lin et al. 2018), section 5, which samples 0.1 to 1 %. Deviations: the paper does
    not say what happens if too few pass; if too many pass, published code keeps the first k by
    index, which starves the end of the vector.
    """

    sample: float = 0.001
    seed: int = 0

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        # If k or more pass, these are selected; if fewer do, all that pass are among them.
        indices, values = kernels.topk(x, k)
        size = x.numel()
        count = max(SMALLEST_SAMPLE, round(self.sample * size))
        if count < size and k < size:
            sampled = x[integers(count, size, self.seed, step)].abs()
            for boost in (1, 1.5, 2):
                rank = min(count, max(1, round(boost * count * k / size)))
                threshold = float(torch.topk(sampled, rank).values[-1])
                passing = reaching(indices, values, threshold)
                if 10 * passing[1].numel() >= 8 * k:
                    return stream_of(*passing, x)
        return stream_of(indices, values, x)
