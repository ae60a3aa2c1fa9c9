"""Auto: whichever of the methods is the fastest here, the engine's dense sum among them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from sparcel import cost
from sparcel.collectives import all_reduce, gtopk, oktopk
from sparcel.collectives.dense import check_agreement
from sparcel.comm import Communicator
from sparcel.errors import InputError, MismatchError, known
from sparcel.memory import wide_dtype
from sparcel.schemes._contest import Contest
from sparcel.schemes.dense import Dense
from sparcel.schemes.sparsifier import Sparsifier, count_for
from sparcel.stream import SparseStream

CANDIDATES = ("dense", "topk", "gtopk", "oktopk")
"""Methods with one memory: each rank sends its own k largest coordinates, and keeps the rest."""


@dataclass(eq=False)
class Auto(Sparsifier):
    """The fastest of several methods, as predicted, and corrected by what steps really take.

    They share the memory, so nothing is lost when the choice changes. A dense step sends what was
    kept back along; the ones after it cost what they cost without a scheme.

    Parameters
    ----------
    candidates
        Which methods to choose among: some of ``"dense"``, ``"topk"``, ``"gtopk"``, ``"oktopk"``.
    corrected
        Time the steps, try what may be faster, and go by what is measured. Choices then depend on
        the clock, and a rerun may make others; False goes by the prediction alone.

    The others are those of `Sparsifier`. Predictions rest on the communicator's ``rates``, or on
    assumed ones where it has none. Choices, and the times behind them, belong to a communicator
    and are no part of the state.
    """

    candidates: Sequence[str] = CANDIDATES
    corrected: bool = True
    _contest: Contest | None = field(default=None, init=False, repr=False)
    _terms: tuple[Any, ...] = field(default=(), init=False, repr=False)
    """What the contest was made for; another one is due where it changes."""
    _owing: bool = field(default=False, init=False, repr=False)
    """Whether some rank may keep something back, which a dense step has to send along."""
    _plain: Dense = field(default_factory=Dense, init=False, repr=False)
    _went_plain: bool = field(default=False, init=False, repr=False)
    _clock: Callable[[], float] = field(default=perf_counter, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.candidates, str) or not self.candidates:
            raise InputError(
                f"candidates must be a list of some of {list(CANDIDATES)}, got {self.candidates!r}"
            )
        for name in self.candidates:
            known(name, CANDIDATES, "candidate")

    @property
    def chosen(self) -> str | None:
        """See `Scheme.chosen`."""
        return self._contest.chosen if self._contest else None

    @property
    def predicted(self) -> dict[str, float]:
        """Seconds a step by method, as the cost model has it; empty before the first step."""
        return dict(self._contest.predicted) if self._contest else {}

    @property
    def measured(self) -> dict[str, float]:
        """Seconds a step by method, as all ranks agreed, of those that have been timed."""
        return dict(self._contest.measured) if self._contest else {}

    def sends_whole(self, gradient: Tensor, comm: Communicator) -> bool:
        """See `Scheme.sends_whole`."""
        self._choose(gradient, comm)
        return self._went_plain

    def begin(self, gradient: Tensor, comm: Communicator, out: Tensor | None = None) -> Tensor:
        """See `Scheme.begin`."""
        contest = self._choose(gradient, comm)
        if not self._went_plain:
            return super().begin(gradient, comm, out)
        started = self._clock()
        update = self._plain.begin(gradient, comm, out)
        contest.record(self._clock() - started, self._plain.finite)
        self.finite = self._plain.finite
        return update

    def reduce(
        self, gradient: Tensor, comm: Communicator, ranks: int | None = None
    ) -> tuple[SparseStream, int]:
        """See `Scheme.reduce`."""
        contest = self._choose(gradient, comm)
        started = self._clock()
        reduce = self._plain.reduce if self._went_plain else super().reduce
        total, divisor = reduce(gradient, comm, ranks)
        contest.record(self._clock() - started, total.finite)
        return total, divisor

    def commit(self) -> None:
        """See `Scheme.commit`."""
        if not self._went_plain:
            super().commit()
        elif self.finite:
            self.steps += 1
            self._memory.load({})  # it is all zeros

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Scheme.load_state_dict`; all ranks of the next step have loaded, or none."""
        super().load_state_dict(state)
        self._contest, self._terms = None, ()

    def _check(self, gradient: Tensor) -> None:
        super()._check(gradient)
        size, dtype = self._terms[:2] or (gradient.numel(), gradient.dtype)
        if (size, dtype) != (gradient.numel(), gradient.dtype):
            raise InputError(
                f"this scheme chose for a vector of {size} coordinates of {dtype}, got a gradient"
                f" of {gradient.numel()} of {gradient.dtype}; make one scheme for each vector"
            )

    def _choose(self, gradient: Tensor, comm: Communicator) -> Contest:
        """Settle what this step does, the same on all ranks; once a step, however often asked."""
        size = gradient.numel()
        layers = self._densities(size)
        k = sum(count_for(density, stop - start) for start, stop, density in layers)
        terms = (size, gradient.dtype, k, comm, comm.rates)
        contest = self._contest
        if contest is None or terms != self._terms:
            contest = Contest(self._predict(gradient, comm, k))
            self._owing = self._meet(gradient, comm, contest)
            self._contest, self._terms = contest, terms
        elif contest.left == 0:
            self._owing = self._account(comm, contest)
        self._went_plain = contest.chosen == "dense" and not (self._owing or self._alters)
        if self._went_plain:
            self._plain.cost = self.cost
            self._memory.withheld = ()  # of what is sent as it is, nothing is kept back either
        return contest

    def _predict(self, gradient: Tensor, comm: Communicator, k: int) -> dict[str, float]:
        """Return the seconds that a step of each candidate should take; dense alone if all is sent.

        Dense steps send the gradient in its own dtype, unless it enters a velocity.
        """
        rates = comm.rates or cost.default_rates()
        here = min(comm.size, rates.ranks_per_node)
        wide = wide_dtype(gradient.dtype).itemsize
        own = wide if self._alters else gradient.element_size()
        names = ("dense",) if super()._sends_all() else self.candidates
        size, predicted = max(1, gradient.numel()), {}
        for name in names:
            itemsize = own if name == "dense" else wide
            problem = cost.Problem(size, min(k, size), comm.size, here, itemsize)
            predicted[name] = cost.predict(f"step:{name}", problem, rates).seconds
        return predicted

    def _meet(self, gradient: Tensor, comm: Communicator, contest: Contest) -> bool:
        """Compare what all ranks start from; return whether some rank keeps something back."""
        check_agreement(SparseStream.unchecked(None, gradient, gradient.numel()), comm)
        facts = repr(contest.predicted).encode()
        digest = int.from_bytes(hashlib.blake2b(facts, digest_size=7).digest())
        gathered = comm.gather_numbers(digest << 1 | self._keeps_something())
        others = [rank for rank, number in enumerate(gathered) if number >> 1 != digest]
        if others:
            raise MismatchError(
                f"ranks {others} predict other times than rank {comm.rank}, which has"
                f" {contest.predicted}; give the scheme the same settings and rates on all ranks"
            )
        return any(number & 1 for number in gathered)

    def _account(self, comm: Communicator, contest: Contest) -> bool:
        """Agree on what the last steps took, and on what comes next; return as `_meet` does.

        A step is over at about the same time everywhere, so the rank that took least came last,
        and the others' times have their waiting for it in them.
        """
        nanoseconds = round(contest.report() * 1e9) if self.corrected else 0
        gathered = comm.gather_numbers(nanoseconds << 1 | self._keeps_something())
        contest.decide(min(number >> 1 for number in gathered) / 1e9)
        return any(number & 1 for number in gathered)

    def _keeps_something(self) -> bool:
        memory = self.memory
        return memory is not None and bool(memory.any())

    @property
    def _alters(self) -> bool:
        """Whether something else than the gradient enters the memory."""
        return self.momentum != 0 or self.clip is not None

    def _sends_all(self) -> bool:
        return self.chosen == "dense"

    def _sum(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        sent = self._select(gradient)
        with self.cost.communicating():
            if self.chosen == "topk":
                return all_reduce(sent, comm, max_nnz=self._most)
            if self.chosen == "gtopk":
                outcome = gtopk(sent, comm, self._k)
                total, kept = outcome.total, outcome.dropped
            else:
                total = oktopk(sent, comm, self._k, self._most)
                kept = sent.without(total)
        if total.finite:
            self._memory.give_back(kept)
        return total
