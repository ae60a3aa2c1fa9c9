"""ScaleCom: one rank chooses coordinates, and all ranks send their values at these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from sparcel.core._checks import checked_number, checked_whole
from sparcel.core.collectives.broadcast import broadcast
from sparcel.core.collectives.doubling import halving_doubling
from sparcel.core.comm import Communicator
from sparcel.core.formats import Expected
from sparcel.core.schemes.selecting import Selecting
from sparcel.core.schemes.sparsifier import entering
from sparcel.core.schemes.step import Ledger, Step
from sparcel.core.selectors import Selector
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import InputError, checked_name


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
        What stays the same when β becomes 1. ``"owed"``, the default: what is owed, which is the
        memory here and the paper's memory over β. ``"memory"``: the paper's memory, so what is owed
        is multiplied by β. Refused without ``beta_steps``.

    The others are those of `Selecting`.
    Source: ScaleCom, Algorithm 1 and section 4. Deviation: the leader selects the largest of the
    whole vector; ``selector="chunkwise"`` is the paper's, which takes one from each chunk.
    """

    selector: str | Selector = "exact"
    beta: float = 1.0
    beta_steps: int | None = None
    beta_switch: str | None = None

    def __post_init__(self) -> None:
        self.beta = checked_number(self.beta, "beta", above=0, at_most=1, hint="1 filters nothing")
        if self.beta_steps is not None:
            self.beta_steps = checked_whole(self.beta_steps, "beta_steps", at_least=1)
            if self.beta == 1:
                raise InputError(
                    f"beta_steps={self.beta_steps} ends the filter, but beta=1 filters nothing;"
                    " pass beta below 1, or leave out beta_steps"
                )
            if self.beta_switch is None:
                self.beta_switch = "owed"
        if self.beta_switch is not None:
            checked_name(self.beta_switch, ["owed", "memory"], "beta_switch")
            if self.beta_steps is None:
                raise InputError(
                    f"beta_switch={self.beta_switch!r} says what stays the same when beta becomes"
                    " 1, and needs beta_steps; pass beta below 1 and beta_steps, or leave out"
                    " beta_switch"
                )
        super().__post_init__()
        self._set_filter()

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._set_filter()

    def _take_effect(self) -> None:
        before = self._memory.filter
        super()._take_effect()
        self._set_filter()
        if self.beta_switch == "memory" and self._memory.filter != before:
            assert self.memory is not None, "the step made it"
            self.memory.mul_(before)

    def _set_filter(self) -> None:
        """Filter the memory by β until ``beta_steps``."""
        ends = self.beta_steps is not None and self.steps >= self.beta_steps
        self._memory.filter = 1.0 if ends else self.beta

    def _take(self, step: Step) -> SparseStream:
        """Select, on the leader; the others learn in the exchange what to take."""
        if step.comm.rank == self._leader(step.comm):
            return super()._take(step)
        own = entering(step, clear=step.out is step.gradient)
        return self._memory.accumulate(own).empty_like()

    def _exchange(self, ledger: Ledger, wire: Wire) -> SparseStream:
        own, leader, indices = ledger.sent, self._leader(wire), None
        if wire.rank == leader:  # they travel without values, as rows of width 0
            rows = own.values.new_empty(own.nnz, 0)
            indices = SparseStream.unchecked(own.indices, rows, own.size, own.finite)
        expected = Expected(own.size, own.dtype, 0, ledger.most, stays_sparse=True)
        chosen = broadcast(indices, wire.exact, leader, expected)
        if not chosen.finite:
            return own.void_like()
        assert chosen.indices is not None, "the leader selects"
        if wire.rank != leader:
            ledger.take(chosen.indices)
        values = ledger.sent.values
        sums = halving_doubling(
            SparseStream.unchecked(None, values, values.numel(), own.finite), wire
        )
        for start, lost in wire.take_lost():
            places = chosen.indices[start : start + lost.size]
            ledger.keep(SparseStream.unchecked(places, lost.values, chosen.size))
        return SparseStream.unchecked(chosen.indices, sums.values, chosen.size, sums.finite)

    def _leader(self, ranks: Communicator | Wire) -> int:
        return self.steps % ranks.size
