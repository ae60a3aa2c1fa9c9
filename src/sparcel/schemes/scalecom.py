"""ScaleCom: one rank chooses coordinates, and all ranks send their values at these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import number, whole_number
from sparcel.collectives.broadcast import broadcast, message_stages
from sparcel.collectives.halving_doubling import halving_doubling
from sparcel.collectives.halving_doubling import stages as halving_doubling_stages
from sparcel.comm import Communicator
from sparcel.errors import InputError, known
from sparcel.formats import Expected
from sparcel.schemes._stages import SMALL, apply_stages
from sparcel.schemes.exchange import Exchanged, Selection
from sparcel.schemes.request import Request
from sparcel.schemes.sparsifier import Selecting
from sparcel.selectors import Selector
from sparcel.stages import Problem, Stage, Work, chosen, copied, scattered
from sparcel.stream import SparseStream
from sparcel.wire import Wire


@dataclass(eq=False)
class ScaleCom(Selecting):
    """The sum of all ranks' values at the coordinates that the step's leader selects (CLT-k).

    Ranks lead in turns. The bytes that a rank receives do not grow with the number of ranks.

    Parameters
    ----------
    beta
        The memory's low-pass filter, in (0, 1]; 1 is no filter. The paper uses 0.1 for large
        batches.
    beta_steps
        The step from which β is 1, as in the late part of the paper's training; None: never.
        Refused if ``beta`` is 1.
    beta_switch
        What stays the same when β changes. ``"owed"``, the default: memory/β is owed before and
        after, and the memory is rescaled. ``"memory"``: the memory itself, as in the paper; what is
        owed is multiplied by β. The same holds for memory loaded from a state with another β.
        Refused without ``beta_steps``.

    The others are those of `Selecting`.
    Source: ScaleCom, Algorithm 1 and section 4. Deviation: the leader selects the largest of the
    whole vector; ``selector="chunkwise"`` is the paper's, which takes one from each chunk.
    """

    selector: str | Selector = "exact"
    beta: float = 1.0
    beta_steps: int | None = None
    beta_switch: str | None = None

    def __post_init__(self) -> None:
        self.beta = number(self.beta, "beta", above=0, at_most=1, hint="1 filters nothing")
        if self.beta_steps is not None:
            self.beta_steps = whole_number(self.beta_steps, "beta_steps", at_least=1)
            if self.beta == 1:
                raise InputError(
                    f"beta_steps={self.beta_steps} ends the filter, but beta=1 filters nothing;"
                    " pass beta below 1, or leave out beta_steps"
                )
            if self.beta_switch is None:
                self.beta_switch = "owed"
        if self.beta_switch is not None:
            known(self.beta_switch, ["owed", "memory"], "beta_switch")
            if self.beta_steps is None:
                raise InputError(
                    f"beta_switch={self.beta_switch!r} says what stays the same when beta becomes"
                    " 1, and needs beta_steps; pass beta below 1 and beta_steps, or leave out"
                    " beta_switch"
                )
        super().__post_init__()

    def filter_at(self, step: int) -> float:
        """See `Scheme.filter_at`."""
        return self.beta if self.beta_steps is None or step < self.beta_steps else 1.0

    def factor_at_switch(self, before: float, after: float) -> float:
        """See `Scheme.factor_at_switch`."""
        keeps_memory = self.beta_switch == "memory"
        return 1.0 if keeps_memory else super().factor_at_switch(before, after)

    def _take(
        self, gradient: Tensor, comm: Communicator, request: Request, clear: bool
    ) -> SparseStream:
        """Select, on the leader; the others only learn in the exchange what to take."""
        if comm.rank == self._leader(comm):
            return super()._take(gradient, comm, request, clear)
        return self._memory.accumulate(
            gradient, request.divisor(comm), request.withheld, clear, request.scale
        )

    def _exchange(self, selection: Selection, wire: Wire) -> Exchanged:
        mine, leader = selection.stream, self._leader(wire)
        indices = _indices_of(mine) if wire.rank == leader else None
        chosen = broadcast(indices, wire.exact, leader, _expected_indices(mine, selection.most))
        if not chosen.finite:
            nothing = mine.void_like()
            return Exchanged(nothing, nothing)
        assert chosen.indices is not None, "the leader selects"
        if wire.rank == leader:
            values = mine.values
        else:
            values = selection.rest.index_select(0, chosen.indices)
            kernels.scatter(selection.rest, chosen.indices, torch.zeros_like(values))
        stream = SparseStream.unchecked(None, values, values.numel(), mine.finite)
        sums = halving_doubling(stream, wire)
        total = SparseStream.unchecked(chosen.indices, sums.values, chosen.size, sums.finite)
        sent = SparseStream.unchecked(chosen.indices, values, chosen.size, mine.finite)
        return Exchanged(total, sent, kept=_lost_of(chosen, wire, values))

    def _leader(self, ranks: Communicator | Wire) -> int:
        return self.steps % ranks.size


def _lost_of(chosen: SparseStream, wire: Wire, like: Tensor) -> SparseStream | None:
    """Return what rounding took from this rank, at the chosen coordinates; None for nothing.

    ``like`` are the values that entered the sum.
    """
    pieces = wire.take_lost()
    if not pieces:
        return None
    lost = torch.zeros_like(like)
    for start, stream in pieces:
        lost[start : start + stream.size] += stream.values
    return SparseStream.unchecked(chosen.indices, lost, chosen.size)


def _indices_of(stream: SparseStream) -> SparseStream:
    """Return the indices without values, as a stream of rows of width 0."""
    rows = stream.values.new_empty(stream.nnz, 0)
    return SparseStream.unchecked(stream.indices, rows, stream.size, stream.finite)


def _expected_indices(like: SparseStream, most: int) -> Expected:
    """Return the bound for a message of at most ``most`` indices from the leader."""
    return Expected(like.size, like.dtype, 0, most, stays_sparse=True)


def stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of a step of `ScaleCom` that rank 0 leads."""
    rank, ranks, k = problem.rank, problem.ranks, problem.k
    yield Work("add", problem.size, times=3)  # fitted to measured steps
    yield Work("select", problem.size, 1 / ranks)  # by the leader
    yield chosen(k, 1 / ranks)
    yield Work("small", SMALL)
    indices = problem.format.exact.nbytes(k, problem.size, 0)
    yield Work("encode", indices, 1 / ranks)
    yield from message_stages(indices, rank, ranks, 0, indices)
    yield copied(k)
    yield scattered(2 * k)
    yield from halving_doubling_stages(replace(problem, size=k, spread=k, union=None))
    yield from apply_stages(problem, k)
