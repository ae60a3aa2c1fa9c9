"""Top-k SGD: every rank sends its k largest coordinates, and all of them are applied."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel.collectives import all_reduce, check_algorithm
from sparcel.comm import Communicator
from sparcel.schemes.sparsifier import Exchanged, Selection, Sparsifier


def exchange_topk(selection: Selection, comm: Communicator, algorithm: str = "auto") -> Exchanged:
    """Sum the ranks' selections; nothing of them goes back to memory."""
    sent = selection.stream
    return Exchanged(all_reduce(sent, comm, algorithm=algorithm, max_nnz=selection.most), sent)


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

    def _exchange(self, selection: Selection, comm: Communicator) -> Exchanged:
        return exchange_topk(selection, comm, self.algorithm)
