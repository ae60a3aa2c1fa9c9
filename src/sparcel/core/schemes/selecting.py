"""The base of schemes whose ranks select coordinates, which an exchange of streams sums."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from typing_extensions import override

from sparcel.core._checks import check_type
from sparcel.core.memory import Share
from sparcel.core.schemes.base import STATE_HINT
from sparcel.core.schemes.costs import Outcome, averaged
from sparcel.core.schemes.sparsifier import Sparsifier, entering, sends_all
from sparcel.core.schemes.step import Ledger, Plan, Span, Step
from sparcel.core.selectors import Selector
from sparcel.core.selectors import selector as make_selector
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire


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
    _spans: tuple[Span, ...] | None = field(default=None, init=False, repr=False)
    """The ranges of which the shares are."""
    _loaded: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selector = make_selector(self.selector)

    @override
    def fresh(self) -> Self:
        assert isinstance(self.selector, Selector), "__post_init__ made one"
        return replace(self, selector=self.selector.fresh())

    @override
    def state_dict(self) -> dict[str, Any]:
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

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._shares, self._spans = [], None
        self._loaded = [dict(one) for one in state.get("selectors", [])]

    def _by_streams(self, step: Step) -> Outcome:
        gradient, _, request, plan, out = step
        if self._sends_all(plan):
            return super()._by_streams(step)
        self._divide(plan.spans)
        with request.costs.selecting():
            taken = self._take(step)
        ledger = Ledger(self._memory, taken, plan.asked, sum([s.most for s in self._shares]))
        wire = self._wire(step)
        with request.costs.communicating():
            total = self._exchange(ledger, wire)
        for start, lost in wire.take_lost():
            ledger.keep(lost, start)
        if self.momentum:
            applied = ledger.sent.within(total).indices
            assert applied is not None, "what leaves memory is sparse"
            self._memory.forget_velocity(applied)
        average = averaged(total, plan.ranks / request.scale, gradient.dtype, out)
        counts = ledger.sent.nnz, total.nnz, (ledger.magnitude,)
        return Outcome(average, average.finite, *counts, plan.coordinates, plan.asked)

    def _sends_all(self, plan: Plan) -> bool:
        return sends_all(plan.spans)

    def _take(self, step: Step) -> SparseStream:
        """Take this rank's selection out of memory + gradient; leave the rest in the scratch."""
        own = entering(step, clear=step.out is step.gradient)
        return self._memory.select(own, self._shares, self.steps)

    @abstractmethod
    def _exchange(self, ledger: Ledger, wire: Wire) -> SparseStream:
        """Return the sum of what the ranks send, or its largest; this is where methods differ.

        What the method does not apply, it gives back to the ledger.
        """

    def _divide(self, spans: tuple[Span, ...]) -> None:
        """Let this step select from these ranges."""
        if self._spans is spans:
            return
        selectors = [share.selector for share in self._shares]
        if len(selectors) != len(spans):
            assert isinstance(self.selector, Selector), "__post_init__ made one"
            selectors = [self.selector.fresh() for _ in spans]
            for selector, state in zip(selectors, self._loaded, strict=False):
                selector.load_state_dict(state)
        self._spans = spans
        self._shares = [
            Share(span.start, span.stop, selector, span.k)
            for span, selector in zip(spans, selectors, strict=True)
        ]
