"""gTop-k SGD: of the ranks' top-k selections, only the globally largest k are applied."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel.collectives.gtopk import gtopk
from sparcel.errors import checked_name
from sparcel.schemes._put_back import PUT_BACK, put_back
from sparcel.schemes.ledger import Ledger
from sparcel.schemes.selecting import Selecting
from sparcel.stream import SparseStream
from sparcel.wire import Wire


def exchange_gtopk(ledger: Ledger, wire: Wire, rule: str = "dropped") -> SparseStream:
    """Return the tree's top-k of the ranks' selections; ``rule`` is `GTopK`'s ``put_back``."""
    return put_back(gtopk(ledger.sent, wire, ledger.k), ledger, wire, rule)


@dataclass(eq=False)
class GTopK(Selecting):
    """The tree's top-k of the sum of the ranks' selections.

    Parameters
    ----------
    put_back
        ``"dropped"``: a partial sum that the tree drops goes to the memory of the rank that
        dropped it, and nothing is lost. ``"own"``: the paper's rule, each rank takes back its own
        values of the coordinates that did not win. This loses the other ranks' part of a sum that
        was dropped on one branch while the coordinate won on another.

    The others are those of `Selecting`. The update has as many coordinates as a rank sends.
    Source: gTop-k, Algorithm 4.
    """

    put_back: str = "dropped"

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_name(self.put_back, PUT_BACK, "put_back")

    def _exchange(self, ledger: Ledger, wire: Wire) -> SparseStream:
        return exchange_gtopk(ledger, wire, self.put_back)
