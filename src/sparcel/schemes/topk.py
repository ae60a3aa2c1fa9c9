"""Top-k SGD: every rank sends its k largest coordinates, and all of them are applied."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel.collectives import all_reduce, check_algorithm
from sparcel.comm import Communicator
from sparcel.schemes.base import Sparsifier, check_density, count_for
from sparcel.stream import SparseStream


@dataclass(eq=False)
class TopK(Sparsifier):
    """The sum of the ranks' exact top-k selections, with error feedback.

    Parameters
    ----------
    density
        Share of the coordinates that a rank sends, in (0, 1].
    algorithm
        The all-reduce that carries them, as in `sparcel.all_reduce`.

    Source: gTop-k, Algorithm 1 (its baseline, after Dryden et al. and Lin et al.).
    """

    density: float = 0.01
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        check_density(self.density)
        check_algorithm(self.algorithm)

    def _sum(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        k = count_for(self.density, gradient.numel())
        sent = self._select(gradient, k)
        with self.cost.communicating():
            return all_reduce(sent, comm, algorithm=self.algorithm, max_nnz=k)
