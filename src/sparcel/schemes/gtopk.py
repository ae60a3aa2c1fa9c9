"""gTop-k SGD: of the ranks' top-k selections, only the globally largest k are applied."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel.collectives.gtopk import gtopk
from sparcel.comm import Communicator
from sparcel.errors import known
from sparcel.schemes.base import Sparsifier, check_density, count_for
from sparcel.stream import SparseStream


@dataclass(eq=False)
class GTopK(Sparsifier):
    """The tree's top-k of the sum of the ranks' exact top-k selections.

    Parameters
    ----------
    density
        Share of the coordinates that a rank sends, and that come back, in (0, 1].
    put_back
        ``"dropped"``: a partial sum that the tree drops goes to the memory of the rank that
        dropped it, and nothing is lost. ``"own"``: the paper's rule, each rank takes back what it
        sent itself of the coordinates that did not win; this loses the others' share in a sum
        that was dropped on one branch while the coordinate won on another.

    Source: gTop-k, Algorithm 4.
    """

    density: float = 0.01
    put_back: str = "dropped"

    def __post_init__(self) -> None:
        check_density(self.density)
        known(self.put_back, ["dropped", "own"], "put_back")

    def _sum(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        k = count_for(self.density, gradient.numel())
        sent = self._select(gradient, k)
        with self.cost.communicating():
            outcome = gtopk(sent, comm, k)
        if outcome.total.finite:
            own = sent.without(outcome.total) if self.put_back == "own" else outcome.dropped
            self._memory.give_back(own)
        return outcome.total
