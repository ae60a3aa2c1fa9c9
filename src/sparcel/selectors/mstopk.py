"""MSTopK: bisects the threshold, then fills up from a random slice of the undecided magnitudes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel import kernels
from sparcel._checks import whole_number
from sparcel.selectors.base import Selector, stream_of
from sparcel.selectors.draws import integers
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
    selected. On the CPU a sampling compares its threshold with the (k+1)-th largest magnitude
    instead of counting in the vector, which gives the same answer.
    """

    samplings: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        self.samplings = whole_number(self.samplings, "samplings", at_least=1)
        self.seed = whole_number(self.seed, "seed")

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Bisect the threshold, and fill up from the slice."""

        def place(count: int) -> int:
            return int(integers(1, count, self.seed, step))

        return stream_of(*kernels.mstopk(x, k, self.samplings, place), x)
