"""SparCML's Quantized TopK SGD: bucketed selection, DSAR, quantised where it turned dense."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel.collectives.split_allgather import quantized_split_allgather, split_allgather
from sparcel.comm import Communicator
from sparcel.formats import Qsgd
from sparcel.schemes.base import Sparsifier, check_density
from sparcel.stream import SparseStream

BUCKET = 512
"""Consecutive coordinates of which a fixed number is selected (SparCML, section 8.3)."""


@dataclass(eq=False)
class SparCML(Sparsifier):
    """The sum of the ranks' bucketed top-k selections, by split and all-gather.

    Of every 512 consecutive coordinates, max(1, round(512·density)) are sent.

    Parameters
    ----------
    density
        Share of the coordinates that a rank sends, in (0, 1].
    bits
        8, 4 or 2: QSGD for regions that became dense. The region's owner remembers what rounding
        lost, where the paper leaves it to chance. None: full precision.
    seed
        Decides, with the step and the coordinate, the random rounding; the same on all ranks.

    Source: SparCML, Algorithm 1 and section 6.
    """

    density: float = 0.01
    bits: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_density(self.density)
        self._quantizer = None if self.bits is None else Qsgd(self.bits)

    def _sum(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        k = max(1, round(BUCKET * self.density))
        max_nnz = k * -(-gradient.numel() // BUCKET)
        sent = self._select(gradient, k, BUCKET)
        with self.cost.communicating():
            if self._quantizer is None:
                return split_allgather(sent, comm, max_nnz=max_nnz)
            seed = self.seed + (self.steps << 32)
            outcome = quantized_split_allgather(sent, comm, self._quantizer, seed, max_nnz)
        if outcome.error is not None:
            error = SparseStream.unchecked(None, outcome.error, outcome.error.numel())
            self._memory.give_back(error, outcome.start)
        return outcome.total
