"""Top-k SGD: every rank sends its k largest coordinates, and the whole sum is applied."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel import auto
from sparcel.collectives import check_algorithm
from sparcel.schemes.ledger import Ledger
from sparcel.schemes.selecting import Selecting
from sparcel.stream import SparseStream
from sparcel.wire import Wire


def exchange_topk(ledger: Ledger, wire: Wire, algorithm: str = "auto") -> SparseStream:
    """Return the sum of the ranks' selections."""
    return auto.all_reduce(ledger.sent, wire, algorithm=algorithm, max_nnz=ledger.most)


@dataclass(eq=False)
class TopK(Selecting):
    """The sum of the ranks' selections, with error feedback.

    Parameters
    ----------
    algorithm
        The all-reduce that sums the selections, as in `sparcel.all_reduce`.

    The others are those of `Selecting`.
    Source: gTop-k, Algorithm 1 (its baseline, after Dryden et al. and Lin et al.).
    """

    algorithm: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_algorithm(self.algorithm)

    def _exchange(self, ledger: Ledger, wire: Wire) -> SparseStream:
        return exchange_topk(ledger, wire, self.algorithm)
