"""gTop-k SGD: of the ranks' top-k selections, only the globally largest k are applied."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel.collectives.gtopk import gtopk
from sparcel.comm import Communicator
from sparcel.errors import known
from sparcel.schemes.sparsifier import Sparsifier
from sparcel.stream import SparseStream


@dataclass(eq=False)
class GTopK(Sparsifier):
    """The tree's top-k of the sum of the ranks' selections.

    Parameters
    ----------
    put_back
        ``"dropped"``: a partial sum that the tree drops goes to the memory of the rank that
        dropped it, and nothing is lost. ``"own"``: the paper's rule, each rank takes back what it
        sent itself of the coordinates that did not win; this loses the others' share in a sum
        that was dropped on one branch while the coordinate won on another.

    The others are those of `Sparsifier`; as many coordinates come back as a rank sends.
    Source: gTop-k, Algorithm 4.
    """

    put_back: str = "dropped"

    def __post_init__(self) -> None:
        super().__post_init__()
        known(self.put_back, ["dropped", "own"], "put_back")

    def _sum(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        sent = self._select(gradient)
        with self.cost.communicating():
            outcome = gtopk(sent, comm, self._k)
        if outcome.total.finite:
            own = sent.without(outcome.total) if self.put_back == "own" else outcome.dropped
            self._memory.give_back(own)
        return outcome.total
