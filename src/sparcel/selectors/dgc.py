"""Double sampling: a threshold from a random sample, then a selection among what passes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import number, whole_number
from sparcel.selectors.base import Selector, stream_of
from sparcel.selectors.draws import integers
from sparcel.selectors.thresholds import reaching
from sparcel.stream import SparseStream

SMALLEST_SAMPLE = 512


@dataclass(eq=False)
class DoubleSampling(Selector):
    """The largest magnitudes, between min(0.8·k, nnz) and k of them.

    The threshold selects the same density from a random sample. If more than k coordinates pass,
    the exact k largest of them are selected. If fewer than 0.8·k pass, the threshold is lowered to
    that of 1.5 times the density, then of twice the density; if still too few pass, the selection
    is exact.

    Parameters
    ----------
    sample
        Share of the coordinates that are sampled, in [0, 1]; at least 512 are. The paper samples
        0.1 to 1 %.
    seed
        Decides, with the step, which coordinates are sampled.

    Source: DGC (Lin et al. 2018), section 5. Deviations: the paper does not say what happens if too
    few pass; if too many pass, published code keeps the first k by index, which starves the end of
    the vector.
    """

    sample: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        self.sample = number(self.sample, "sample", at_least=0, at_most=1)
        self.seed = whole_number(self.seed, "seed")

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Find the threshold in a sample, and select what passes it."""
        # If k or more pass, these are selected; if fewer do, all that pass are among them.
        indices, values = kernels.topk(x, k)
        size = x.numel()
        count = max(SMALLEST_SAMPLE, round(self.sample * size))
        if count < size and k < size:
            coordinates = integers(count, size, self.seed, step, x.device)
            sampled = x[coordinates].abs()
            for boost in (1, 1.5, 2):
                rank = min(count, max(1, round(boost * count * k / size)))
                threshold = float(torch.topk(sampled, rank).values[-1])
                passing = reaching(indices, values, threshold)
                if 10 * passing[1].numel() >= 8 * k:
                    return stream_of(*passing, x)
        return stream_of(indices, values, x)
