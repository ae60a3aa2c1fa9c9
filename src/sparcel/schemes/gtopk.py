"""gTop-k SGD: of the ranks' top-k selections, only the globally largest k are applied."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel.collectives.gtopk import gtopk
from sparcel.comm import Communicator
from sparcel.errors import known
from sparcel.schemes.sparsifier import Exchanged, Selection, Sparsifier


def exchange_gtopk(
    selection: Selection, comm: Communicator, put_back: str = "dropped"
) -> Exchanged:
    """Find the tree's top-k of the ranks' selections; what it dropped goes back to memory."""
    sent = selection.stream
    outcome = gtopk(sent, comm, selection.k)
    total = outcome.total
    if not total.finite:
        return Exchanged(total, sent)
    kept = sent.without(total) if put_back == "own" else outcome.dropped
    return Exchanged(total, sent, kept)


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

    def _exchange(self, selection: Selection, comm: Communicator) -> Exchanged:
        return exchange_gtopk(selection, comm, self.put_back)
