"""Auto: chooses the fastest of several methods, the engine's dense sum included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from typing_extensions import override

from sparcel.core import cost, device
from sparcel.core.collectives.all_reduce import check_agreement
from sparcel.core.comm import Communicator, digest
from sparcel.core.cost import Problem
from sparcel.core.formats import Format
from sparcel.core.memory import wide_dtype
from sparcel.core.schemes.base import Scheme
from sparcel.core.schemes.dense import Dense
from sparcel.core.schemes.selecting import (
    Selecting,
    exchange_gtopk,
    exchange_oktopk,
    exchange_topk,
)
from sparcel.core.schemes.step import Outcome, Plan, Selection, Span, Step
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import InputError, MismatchError, checked_name

EXCHANGES: dict[str, Callable[[Selection, Wire], SparseStream]] = {
    "topk": exchange_topk,
    "gtopk": exchange_gtopk,
    "oktopk": exchange_oktopk,
}
"""Methods that can share a memory: each rank sends k coordinates and keeps the rest."""

CANDIDATES = ("dense", *EXCHANGES)


@dataclass(eq=False)
class Auto(Selecting):
    """The method that is predicted to be the fastest, of several.

    The methods share the memory, so nothing is lost when the choice changes. The first dense step
    also sends what was kept back; later dense steps cost as much as without a scheme. Dense steps
    round nothing, whatever the format.

    Parameters
    ----------
    candidates
        Which methods to choose among: some of ``"dense"``, ``"topk"``, ``"gtopk"``, ``"oktopk"``.

    The others are those of `Selecting`. Predictions rest on the communicator's ``rates``, or on
    assumed rates if it has none. A choice belongs to a communicator and is not part of the state.
    """

    candidates: Sequence[str] = CANDIDATES
    _predicted: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _terms: tuple[Any, ...] = field(default=(), init=False, repr=False)
    """What was predicted; if it changes, the ranks choose again."""
    _owing: bool = field(default=False, init=False, repr=False)
    """Whether some rank may have kept something back, which a dense step must send along."""
    _sent_whole: bool = field(default=False, init=False, repr=False)
    """Whether the step that has begun is one of `Dense`, without a memory."""
    _plain: Dense = field(default_factory=Dense, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        named = isinstance(self.candidates, Sequence) and not isinstance(self.candidates, str)
        if not (named and self.candidates):
            raise InputError(
                f"candidates must be a list of some of {list(CANDIDATES)}, got {self.candidates!r}"
            )
        for name in self.candidates:
            checked_name(name, CANDIDATES, "candidate")

    @property
    def chosen(self) -> str | None:
        """See `Scheme.chosen`; None before the first step."""
        return min(self._predicted, key=self._predicted.__getitem__, default=None)

    @property
    def predicted(self) -> dict[str, float]:
        """The predicted seconds of a step, by method; empty before the first step."""
        return dict(self._predicted)

    @override
    def reduce(self, step: Step) -> Outcome:
        self._choose(step)
        # Such a step has no memory to send or keep, so it can use the engine's dense all-reduce.
        self._sent_whole = self.chosen == "dense" and not (self._owing or self._alters)
        return self._plain.reduce(step) if self._sent_whole else super().reduce(step)

    def _take_effect(self) -> None:
        if self._sent_whole:
            Scheme._take_effect(self)
            self._memory.load({})  # it is all zeros
        else:
            super()._take_effect()

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Scheme.restore`; all ranks of the next step have loaded, or none."""
        super().restore(state)
        self._predicted, self._terms = {}, ()

    def _check(self, gradient: Tensor) -> None:
        super()._check(gradient)
        size, dtype = self._terms[:2] or (gradient.numel(), gradient.dtype)
        if (size, dtype) != (gradient.numel(), gradient.dtype):
            raise InputError(
                f"this scheme chose for a vector of {size} coordinates of {dtype}, got a gradient"
                f" of {gradient.numel()} of {gradient.dtype}; make one scheme for each vector"
            )

    def _choose(self, step: Step) -> None:
        """Choose for this step; all ranks choose the same."""
        gradient, comm, plan = step.gradient, step.comm, step.plan
        k = sum([span.k for span in plan.spans])
        terms = (gradient.numel(), gradient.dtype, k, comm, comm.rates)
        if terms != self._terms:
            predicted = self._predict(gradient, comm, plan, k)
            self._owing = self._meet(gradient, comm, predicted)
            self._predicted, self._terms = predicted, terms
        elif self.chosen == "dense" and self._owing:
            self._owing = any(comm.gather_numbers(int(self._keeps_something())))

    def _predict(
        self, gradient: Tensor, comm: Communicator, plan: Plan, k: int
    ) -> dict[str, float]:
        """Predict the seconds of a step of each candidate; of dense alone if everything is sent.

        Dense steps send the gradient in its own dtype, unless it enters a velocity.
        """
        rates = comm.rates or cost.default_rates()
        here = min(comm.size, rates.ranks_per_node)
        wide = wide_dtype(gradient.dtype).itemsize
        own = wide if self._alters else gradient.element_size()
        names = ("dense",) if super()._sends_all(plan) else self.candidates
        size, predicted = max(1, gradient.numel()), {}
        for name in names:
            itemsize = own if name == "dense" else wide
            problem = Problem(size, min(k, size), comm.size, here, itemsize, format=plan.format)
            predicted[name] = cost.predict(cost.STEPS[name], problem, rates).seconds
        return predicted

    def _meet(self, gradient: Tensor, comm: Communicator, predicted: dict[str, float]) -> bool:
        """Compare the ranks' predictions; return whether some rank keeps something back."""
        check_agreement(SparseStream.unchecked(None, gradient, gradient.numel()), Wire(comm))
        own = digest(repr(predicted), 56)
        gathered = comm.gather_numbers(own << 1 | self._keeps_something())
        others = [rank for rank, number in enumerate(gathered) if number >> 1 != own]
        if others:
            raise MismatchError(
                f"ranks {others} predict other times than rank {comm.rank}, which has"
                f" {predicted}; give the scheme the same settings and rates on all ranks"
            )
        return any(number & 1 for number in gathered)

    def _keeps_something(self) -> bool:
        memory = self.memory
        return memory is not None and device.truth(memory.any())

    @property
    def _alters(self) -> bool:
        """Whether a velocity or a clipped gradient enters the memory instead of the gradient."""
        return self.momentum != 0 or self.clip is not None

    def _up_and_down(self, spans: Sequence[Span], format: Format) -> None:
        """Dense steps round nothing."""

    def _sends_all(self, plan: Plan) -> bool:
        return self.chosen == "dense"

    def _wire(self, step: Step) -> Wire:
        wire = super()._wire(step)
        return wire.exact if self.chosen == "dense" else wire

    def _exchange(self, selection: Selection, wire: Wire) -> SparseStream:
        assert self.chosen is not None, "reduce chose"
        return EXCHANGES[self.chosen](selection, wire)
