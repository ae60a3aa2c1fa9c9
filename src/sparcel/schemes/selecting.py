"""The base of schemes whose ranks select coordinates, which an exchange of streams sums."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor

from sparcel._checks import check_type
from sparcel.comm import Communicator
from sparcel.memory import Share
from sparcel.schemes._state import STATE_HINT
from sparcel.schemes.density import count_for
from sparcel.schemes.ledger import Ledger
from sparcel.schemes.outcome import Reduced
from sparcel.schemes.request import Request
from sparcel.schemes.sparsifier import Sparsifier, unless_void
from sparcel.selectors import Selector
from sparcel.selectors import selector as make_selector
from sparcel.stream import SparseStream
from sparcel.wire import Wire


@dataclass(eq=False)
class Selecting(Sparsifier):
    """A scheme whose ranks select coordinates, which an exchange of streams sums.

    Parameters
    ----------
    selector
        A selector, or a name of `sparcel.selectors.SELECTORS`.

    The others are those of `Sparsifier`.
    """

    selector: str | Selector = "exact"
    _shares: list[Share] = field(default_factory=list, init=False, repr=False)
    _loaded: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selector = make_selector(self.selector)

    def fresh(self) -> Self:
        """See `Scheme.fresh`."""
        assert isinstance(self.selector, Selector), "__post_init__ made one"
        return replace(self, selector=self.selector.fresh())

    def state_dict(self) -> dict[str, Any]:
        """See `Scheme.state_dict`."""
        selectors = [share.selector.state_dict() for share in self._shares] or self._loaded
        return super().state_dict() | {"selectors": selectors}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        selectors = state.get("selectors", [])
        check_type(selectors, list, "the state's 'selectors'", STATE_HINT)
        for one in selectors:
            check_type(one, Mapping, "each of the state's 'selectors'", STATE_HINT)
            assert isinstance(self.selector, Selector), "__post_init__ made one"
            self.selector.fresh().load_state_dict(one)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Scheme.restore`."""
        super().restore(state)
        self._shares = []
        self._loaded = [dict(one) for one in state.get("selectors", [])]

    def _reduce_part(
        self,
        gradient: Tensor,
        comm: Communicator,
        request: Request,
        out: Tensor | None,
    ) -> Reduced:
        costs = request.costs
        self._shares = self._divided(gradient.numel(), request)
        k, most = sum(share.k for share in self._shares), sum(share.most for share in self._shares)
        costs.asked += k
        with costs.selecting():
            taken = self._take(gradient, comm, request, clear=out is gradient)
        ledger = Ledger(self._memory, taken, k, most)
        wire = self._wire(comm, gradient.numel(), k)
        with costs.communicating():
            total = self._exchange(ledger, wire)
        for start, lost in wire.take_lost():
            ledger.keep(lost, start)
        costs.selected += ledger.sent.nnz
        costs.magnitude += unless_void(ledger.magnitude, total.finite)
        if self.momentum:
            applied = ledger.sent.within(total).indices
            assert applied is not None, "what leaves memory is sparse"
            self._memory.forget_velocity(applied)
        return Reduced(total, request.update_divisor(comm))

    def _take(
        self, gradient: Tensor, comm: Communicator, request: Request, clear: bool
    ) -> SparseStream:
        """Take this rank's selection out of memory + gradient; leave the rest in the scratch."""
        return self._memory.select(
            gradient,
            self._shares,
            self.steps,
            request.divisor(comm),
            request.withheld,
            clear,
            request.scale,
        )

    @abstractmethod
    def _exchange(self, ledger: Ledger, wire: Wire) -> SparseStream:
        """Return the sum of what the ranks send, or its largest; this is where methods differ.

        What the method does not apply, it gives back to the ledger.
        """

    def _divided(self, size: int, request: Request) -> list[Share]:
        """Return the ranges of this step, with the number of coordinates to select from each."""
        ranges = self._densities(size, request)
        selectors = [share.selector for share in self._shares]
        if len(selectors) != len(ranges):
            assert isinstance(self.selector, Selector), "__post_init__ made one"
            selectors = [self.selector.fresh() for _ in ranges]
            for selector, state in zip(selectors, self._loaded, strict=False):
                selector.load_state_dict(state)
        return [
            Share(start, stop, selector, count_for(density, stop - start))
            for (start, stop, density), selector in zip(ranges, selectors, strict=True)
        ]
