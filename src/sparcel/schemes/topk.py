"""Top-k SGD: every rank sends its k largest coordinates, and all of them are applied."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel.collectives import all_reduce, check_algorithm
from sparcel.comm import Communicator
from sparcel.schemes.sparsifier import Sparsifier
from sparcel.stream import SparseStream


@dataclass(eq=False)
class TopK(Sparsifier):
    """The sum of the ranks' selections, with error feedback.

    Parameters
    ----------
    algorithm
        The all-reduce that carries them, as in `sparcel.all_reduce`.

    The others are those of `Sparsifier`.
    Source: gTop-k, Algorithm 1 (its baseline, after Dryden et al. and Lin et al.).
    """

    algorithm: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_algorithm(self.algorithm)

    def _sum(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        sent = self._select(gradient)
        with self.cost.communicating():
            return all_reduce(sent, comm, algorithm=self.algorithm, max_nnz=self._most)
