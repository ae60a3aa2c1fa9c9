"""ScaleCom: one rank chooses coordinates, all ranks send theirs, and the sum stays as sparse."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel.collectives.halving_doubling import halving_doubling
from sparcel.collectives.index_broadcast import index_broadcast
from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.schemes.request import Request
from sparcel.schemes.sparsifier import Exchanged, Selection, Sparsifier
from sparcel.selectors import Selector
from sparcel.stream import SparseStream


@dataclass(eq=False)
class ScaleCom(Sparsifier):
    """The sum of what all ranks hold at the coordinates that the step's leader selects (CLT-k).

    Ranks lead in turns. What a rank receives does not grow with their number.

    Parameters
    ----------
    beta
        The memory's low-pass filter, in (0, 1]; the paper has 0.1 for large batches. 1 is none.
    beta_steps
        The step from which β is 1, as late in the paper's training; None: never.

    The others are those of `Sparsifier`.
    Source: ScaleCom, Algorithm 1 and section 4.
    """

    selector: str | Selector = "chunkwise"
    beta: float = 1.0
    beta_steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise InputError(f"beta must lie in (0, 1], got {self.beta:g}; 1 filters nothing")
        super().__post_init__()

    def filter_at(self, step: int) -> float:
        """See `Sparsifier.filter_at`."""
        return self.beta if self.beta_steps is None or step < self.beta_steps else 1.0

    def _take(self, gradient: Tensor, comm: Communicator, request: Request) -> SparseStream:
        """Select, on the leader; the others only learn in the exchange what to take."""
        if comm.rank == self._leader(comm):
            return super()._take(gradient, comm, request)
        return self._memory.accumulate(gradient, request.divisor(comm), request.withheld)

    def _exchange(self, selection: Selection, comm: Communicator) -> Exchanged:
        mine, leader = selection.stream, self._leader(comm)
        chosen = index_broadcast(mine, comm, leader, selection.most)
        if not chosen.finite:
            nothing = mine.empty_like()
            nothing.finite = False
            return Exchanged(nothing, nothing)
        assert chosen.indices is not None, "the leader selects"
        values = mine.values if comm.rank == leader else self._memory.take(chosen.indices)
        stream = SparseStream.unchecked(None, values, values.numel(), mine.finite)
        sums = halving_doubling(stream, comm)
        total = SparseStream.unchecked(chosen.indices, sums.values, chosen.size, sums.finite)
        return Exchanged(total, total)

    def _leader(self, comm: Communicator) -> int:
        return self.steps % comm.size
