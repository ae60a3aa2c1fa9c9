"""Ok-Topk SGD: the k largest of the sums of regions, at a volume that does not grow with P."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sparcel._checks import check_type, number, whole_number
from sparcel.collectives.oktopk import oktopk
from sparcel.collectives.oktopk import stages as oktopk_stages
from sparcel.collectives.oktopk_reuse import Estimates, oktopk_reuse
from sparcel.errors import InputError, known
from sparcel.schemes._put_back import PUT_BACK, settled
from sparcel.schemes._stages import apply_stages, select_stages
from sparcel.schemes._state import STATE_HINT
from sparcel.schemes.exchange import Exchanged, Selection
from sparcel.schemes.outcome import Reduced
from sparcel.schemes.sparsifier import Selecting
from sparcel.selectors import selector
from sparcel.stages import Problem, Stage, scattered
from sparcel.wire import Wire


def exchange_oktopk(selection: Selection, wire: Wire, put_back: str = "dropped") -> Exchanged:
    """Find the k largest of the sums; see `OkTopK` for ``put_back``."""
    sent = selection.stream
    return settled(oktopk(sent, wire, selection.k, selection.most), sent, wire, put_back)


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
    Source: Ok-Topk, Algorithms 1 and 2.
    """

    threshold: str = "exact"
    threshold_steps: int | None = None
    boundary_steps: int | None = None
    put_back: str = "dropped"
    _estimates: Estimates = field(default_factory=Estimates, init=False, repr=False)

    def __post_init__(self) -> None:
        known(self.threshold, ["exact", "reuse"], "threshold")
        known(self.put_back, PUT_BACK, "put_back")
        reuses = self.threshold == "reuse"
        self.threshold_steps = _checked_steps(self.threshold_steps, "threshold_steps", reuses, 32)
        self.boundary_steps = _checked_steps(self.boundary_steps, "boundary_steps", reuses, 64)
        if reuses and self.selector == "exact":
            self.selector = selector("reuse", period=self.threshold_steps)
        super().__post_init__()

    def _exchange(self, selection: Selection, wire: Wire) -> Exchanged:
        if self.threshold_steps is None or self.boundary_steps is None:  # nothing is reused
            return exchange_oktopk(selection, wire, self.put_back)
        outcome, estimates = oktopk_reuse(
            selection.stream,
            wire,
            selection.k,
            self._estimates,
            renew_boundaries=self.steps % self.boundary_steps == 0,
            renew_threshold=self.steps % self.threshold_steps == 0,
            max_nnz=selection.most,
        )
        exchanged = settled(outcome, selection.stream, wire, self.put_back)
        return replace(exchanged, estimates=estimates)

    def _take_effect(self, reduced: Reduced) -> None:
        super()._take_effect(reduced)
        self._estimates = reduced.estimates or self._estimates

    def state_dict(self) -> dict[str, Any]:
        """See `Scheme.state_dict`."""
        return super().state_dict() | {"estimates": asdict(self._estimates)}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        _estimates_of(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Scheme.restore`."""
        super().restore(state)
        self._estimates = _estimates_of(state)


def _estimates_of(state: Mapping[str, Any]) -> Estimates:
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
            whole_number(one, f"a boundary in {name}", at_least=0, hint=STATE_HINT)
            for one in boundaries
        )
        if boundaries[:1] != (0,) or list(boundaries) != sorted(boundaries):
            raise InputError(f"{name} must have boundaries that rise from 0; {STATE_HINT}")
    if threshold is not None:
        threshold = number(
            threshold, f"the threshold in {name}", at_least=0, below=math.inf, hint=STATE_HINT
        )
    k = whole_number(found.get("k", 0), f"k in {name}", at_least=0, hint=STATE_HINT)
    return Estimates(boundaries, threshold, k)


def _checked_steps(steps: int | None, name: str, reuses: bool, default: int) -> int | None:
    """Return how many steps an estimate serves, None if nothing is reused."""
    if steps is None:
        return default if reuses else None
    steps = whole_number(steps, name, at_least=1)
    if not reuses:
        raise InputError(
            f'{name}={steps} needs threshold="reuse"; with threshold="exact" nothing is reused, so'
            f" leave out {name}"
        )
    return steps


def stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of a step of `OkTopK`."""
    yield from select_stages(problem)
    yield from oktopk_stages(problem)
    yield scattered(problem.k)
    yield from apply_stages(problem, problem.k)
