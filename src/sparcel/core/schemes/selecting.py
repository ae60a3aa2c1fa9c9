"""Schemes whose ranks select coordinates: their base, and top-k SGD, gTop-k and Ok-Topk."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from typing_extensions import override

from sparcel.core import auto
from sparcel.core._checks import check_type, checked_number, checked_whole
from sparcel.core.collectives import check_algorithm
from sparcel.core.collectives.gtopk import GlobalTopk, gtopk
from sparcel.core.collectives.oktopk import Estimates, oktopk, oktopk_reuse
from sparcel.core.memory import Share
from sparcel.core.schemes.base import STATE_HINT
from sparcel.core.schemes.sparsifier import Sparsifier, entering, sends_all
from sparcel.core.schemes.step import Outcome, Plan, Selection, Span, Step, averaged
from sparcel.core.selectors import Selector
from sparcel.core.selectors import selector as make_selector
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import InputError, checked_name


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
        selection = Selection(self._memory, taken, plan.asked, sum([s.most for s in self._shares]))
        wire = self._wire(step)
        with request.costs.communicating():
            total = self._exchange(selection, wire)
        for start, lost in wire.take_lost():
            selection.put_back(lost, start)
        if self.momentum:
            applied = selection.sent.within(total).indices
            assert applied is not None, "what leaves memory is sparse"
            self._memory.forget_velocity(applied)
        average = averaged(total, plan.ranks / request.scale, gradient.dtype, out)
        counts = selection.sent.nnz, total.nnz, (selection.magnitude,)
        return Outcome(average, average.finite, *counts, plan.coordinates, plan.asked)

    def _sends_all(self, plan: Plan) -> bool:
        return sends_all(plan.spans)

    def _take(self, step: Step) -> SparseStream:
        """Take this rank's selection out of memory + gradient; leave the rest in the scratch."""
        own = entering(step, clear=step.out is step.gradient)
        return self._memory.select(own, self._shares, self.steps)

    @abstractmethod
    def _exchange(self, selection: Selection, wire: Wire) -> SparseStream:
        """Return the sum of what the ranks send, or its largest; this is where methods differ.

        What the method does not apply, it puts back.
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


def exchange_topk(selection: Selection, wire: Wire, algorithm: str = "auto") -> SparseStream:
    """Return the sum of the ranks' selections."""
    return auto.all_reduce(selection.sent, wire, algorithm=algorithm, max_nnz=selection.most)


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

    def _exchange(self, selection: Selection, wire: Wire) -> SparseStream:
        return exchange_topk(selection, wire, self.algorithm)


PUT_BACK = ("dropped", "own")


def put_back(outcome: GlobalTopk, selection: Selection, wire: Wire, rule: str) -> SparseStream:
    """Keep what this rank dropped, or what it sent in vain; return what won.

    A rank that takes back its own values takes them back unrounded.
    """
    total = outcome.total
    if rule == "dropped":
        selection.put_back(outcome.dropped)
    else:
        selection.put_back(selection.sent.without(total))
        for start, lost in wire.take_lost():
            selection.put_back(lost.placed(start, total.size).within(total))
    return total


def exchange_gtopk(selection: Selection, wire: Wire, rule: str = "dropped") -> SparseStream:
    """Return the tree's top-k of the ranks' selections; ``rule`` is `GTopK`'s ``put_back``."""
    return put_back(gtopk(selection.sent, wire, selection.k), selection, wire, rule)


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

    def _exchange(self, selection: Selection, wire: Wire) -> SparseStream:
        return exchange_gtopk(selection, wire, self.put_back)


def exchange_oktopk(selection: Selection, wire: Wire, rule: str = "dropped") -> SparseStream:
    """Return the k largest of the sums; ``rule`` is `OkTopK`'s ``put_back``."""
    return put_back(
        oktopk(selection.sent, wire, selection.k, selection.most), selection, wire, rule
    )


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
    _estimates: Estimates = field(default_factory=Estimates, init=False, repr=False)
    _renewed: Estimates = field(default_factory=Estimates, init=False, repr=False)
    """The estimates with which the next step goes on, if this one commits."""

    def __post_init__(self) -> None:
        checked_name(self.threshold, ["exact", "reuse"], "threshold")
        checked_name(self.put_back, PUT_BACK, "put_back")
        reuses = self.threshold == "reuse"
        self.threshold_steps = _checked_steps(self.threshold_steps, "threshold_steps", reuses, 32)
        self.boundary_steps = _checked_steps(self.boundary_steps, "boundary_steps", reuses, 64)
        if reuses and self.selector == "exact":
            self.selector = make_selector("reuse", period=self.threshold_steps)
        super().__post_init__()

    def _exchange(self, selection: Selection, wire: Wire) -> SparseStream:
        if self.threshold_steps is None or self.boundary_steps is None:
            return exchange_oktopk(selection, wire, self.put_back)
        outcome, self._renewed = oktopk_reuse(
            selection.sent,
            wire,
            selection.k,
            self._estimates,
            renew_boundaries=self.steps % self.boundary_steps == 0,
            renew_threshold=self.steps % self.threshold_steps == 0,
            max_nnz=selection.most,
        )
        return put_back(outcome, selection, wire, self.put_back)

    def _take_effect(self) -> None:
        super()._take_effect()
        self._estimates = self._renewed

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.threshold == "reuse":
            state["estimates"] = asdict(self._estimates)
        return state

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        _checked_estimates(state)

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._estimates = self._renewed = _checked_estimates(state)


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


def _checked_estimates(state: Mapping[str, Any]) -> Estimates:
    """Return the estimates of a state, or raise `InputError`."""
    found, name = state.get("estimates", {}), "the state's 'estimates'"
    check_type(found, Mapping, name, STATE_HINT)
    if unknown := found.keys() - {one.name for one in fields(Estimates)}:
        raise InputError(f"{name} must not have {sorted(map(str, unknown))}; {STATE_HINT}")
    boundaries, threshold = found.get("boundaries"), found.get("threshold")
    if boundaries is not None:  # some formats of checkpoints know lists only
        if not isinstance(boundaries, list | tuple):
            raise InputError(
                f"{name} must have a list of boundaries, got {boundaries!r}; {STATE_HINT}"
            )
        boundaries = tuple(
            checked_whole(one, f"a boundary in {name}", at_least=0, hint=STATE_HINT)
            for one in boundaries
        )
        if boundaries[:1] != (0,) or list(boundaries) != sorted(boundaries):
            raise InputError(f"{name} must have boundaries that rise from 0; {STATE_HINT}")
    if threshold is not None:
        threshold = checked_number(
            threshold, f"the threshold in {name}", at_least=0, below=math.inf, hint=STATE_HINT
        )
    k = checked_whole(found.get("k", 0), f"k in {name}", at_least=0, hint=STATE_HINT)
    return Estimates(boundaries, threshold, k)
