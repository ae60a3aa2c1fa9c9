"""Ok-Topk SGD: the k largest of the sums of regions, at a volume that does not grow with P."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparcel._checks import checked_whole
from sparcel.collectives.oktopk import oktopk
from sparcel.errors import InputError, checked_name
from sparcel.schemes._put_back import PUT_BACK, put_back
from sparcel.schemes.ledger import Ledger
from sparcel.schemes.papers.reuse import Reuse, checked_estimates
from sparcel.schemes.selecting import Selecting
from sparcel.selectors import selector
from sparcel.stream import SparseStream
from sparcel.wire import Wire


def exchange_oktopk(ledger: Ledger, wire: Wire, rule: str = "dropped") -> SparseStream:
    """Return the k largest of the sums; ``rule`` is `OkTopK`'s ``put_back``."""
    return put_back(oktopk(ledger.sent, wire, ledger.k, ledger.most), ledger, wire, rule)


@dataclass(eq=False)
class OkTopK(Selecting):
    """Each rank sums one region of the vector, and the k largest of all sums are applied.

    Parameters
    ----------
    threshold
        ``"exact"``: the k largest, in every step. ``"reuse"``: the paper's estimates, boundaries
        and thresholds of earlier steps. These include local thresholds unless a selector is given.
    threshold_steps
        With ``"reuse"``, how many steps thresholds serve: the paper's τ′, by default its 32. With
        ``"exact"`` it is refused.
    boundary_steps
        The same for the boundaries of regions: the paper's τ, by default its 64.
    put_back
        ``"dropped"``: a sum that does not win stays in the memory of the rank that summed it, so
        that its parts meet there, and are selected by what they are together. ``"own"``: the
        paper's rule, each rank takes back its own values.

    The others are those of `Selecting`.
    Source: Ok-Topk, Algorithms 1 and 2. Deviation: the memory holds gradients, where Algorithm 2
    accumulates them times the learning rate. So what is owed is applied at the rate of that step.
    """

    threshold: str = "exact"
    threshold_steps: int | None = None
    boundary_steps: int | None = None
    put_back: str = "dropped"
    _reuse: Reuse | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        checked_name(self.threshold, ["exact", "reuse"], "threshold")
        checked_name(self.put_back, PUT_BACK, "put_back")
        reuses = self.threshold == "reuse"
        self.threshold_steps = _checked_steps(self.threshold_steps, "threshold_steps", reuses, 32)
        self.boundary_steps = _checked_steps(self.boundary_steps, "boundary_steps", reuses, 64)
        if reuses and self.selector == "exact":
            self.selector = selector("reuse", period=self.threshold_steps)
        if self.threshold_steps is not None and self.boundary_steps is not None:
            self._reuse = Reuse(self.threshold_steps, self.boundary_steps)
        super().__post_init__()

    def _exchange(self, ledger: Ledger, wire: Wire) -> SparseStream:
        if self._reuse is None:
            return exchange_oktopk(ledger, wire, self.put_back)
        outcome = self._reuse.exchange(ledger, wire, self.steps)
        return put_back(outcome, ledger, wire, self.put_back)

    def _take_effect(self) -> None:
        super()._take_effect()
        if self._reuse is not None:
            self._reuse.commit()

    def state_dict(self) -> dict[str, Any]:
        """See `Scheme.state_dict`."""
        state = super().state_dict()
        return state if self._reuse is None else state | {"estimates": self._reuse.state_dict()}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        checked_estimates(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Scheme.restore`."""
        super().restore(state)
        if self._reuse is not None:
            self._reuse.load(state)


def _checked_steps(steps: int | None, name: str, reuses: bool, default: int) -> int | None:
    """Return how many steps an estimate serves, None if nothing is reused."""
    if steps is None:
        return default if reuses else None
    steps = checked_whole(steps, name, at_least=1)
    if not reuses:
        raise InputError(
            f'{name}={steps} needs threshold="reuse"; with threshold="exact" nothing is reused, so'
            f" leave out {name}"
        )
    return steps
