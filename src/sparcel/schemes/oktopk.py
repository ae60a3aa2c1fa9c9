"""Ok-Topk SGD: the global top-k of the ranks' selections, at a volume that P does not matter to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from sparcel.collectives.oktopk import Estimates, oktopk, oktopk_reuse
from sparcel.comm import Communicator
from sparcel.errors import InputError, known
from sparcel.schemes.sparsifier import Sparsifier
from sparcel.selectors import selector
from sparcel.stream import SparseStream


@dataclass(eq=False)
class OkTopK(Sparsifier):
    """The k largest coordinates of the sum of the ranks' selections.

    Parameters
    ----------
    threshold
        ``"exact"``: the k largest, in every step. ``"reuse"``: the paper's estimates, boundaries
        and thresholds of earlier steps, the local ones included unless a selector is given.
    threshold_steps, boundary_steps
        With ``"reuse"``, how many steps an estimate serves: the paper's τ′ and τ.

    The others are those of `Sparsifier`.
    Source: Ok-Topk, Algorithms 1 and 2.
    """

    threshold: str = "exact"
    threshold_steps: int = 32
    boundary_steps: int = 64
    _estimates: Estimates = field(init=False, repr=False)
    _estimated: Estimates = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known(self.threshold, ["exact", "reuse"], "threshold")
        for period in (self.threshold_steps, self.boundary_steps):
            if period < 1:
                raise InputError(f"an estimate serves at least 1 step, got {period}")
        if self.threshold == "reuse" and self.selector == "exact":
            self.selector = selector("reuse", period=self.threshold_steps)
        super().__post_init__()
        self._estimates = self._estimated = Estimates()

    def _sum(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        sent = self._select(gradient)
        with self.cost.communicating():
            if self.threshold == "exact":
                total = oktopk(sent, comm, self._k, self._most)
            else:
                total, self._estimated = oktopk_reuse(
                    sent,
                    comm,
                    self._k,
                    self._estimates,
                    renew_boundaries=self.steps % self.boundary_steps == 0,
                    renew_threshold=self.steps % self.threshold_steps == 0,
                    max_nnz=self._most,
                )
        if total.finite:
            # Owners hold complete sums: a coordinate wins with all its parts, or none is applied.
            self._memory.give_back(sent.without(total))
        return total

    def commit(self) -> None:
        """See `Scheme.commit`."""
        super().commit()
        if self.finite:
            self._estimates = self._estimated

    def state_dict(self) -> dict[str, Any]:
        """See `Scheme.state_dict`."""
        return super().state_dict() | {"estimates": asdict(self._estimates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Scheme.load_state_dict`."""
        super().load_state_dict(state)
        self._estimates = self._estimated = Estimates(**state.get("estimates", {}))
