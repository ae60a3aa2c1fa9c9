"""The base of all schemes: a step as a transaction, the update, and the state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core._checks import (
    FLOAT_DTYPES,
    all_finite,
    check_like,
    check_part,
    check_type,
    checked_filter,
    checked_flag,
    checked_whole,
)
from sparcel.core.comm import Call, Communicator, Group, resolve
from sparcel.core.device import truth
from sparcel.core.formats import Format
from sparcel.core.memory import saturate, wide_dtype
from sparcel.core.profiling import profiled
from sparcel.core.schemes.step import Outcome, Plan, Request, Step, named
from sparcel.core.selectors import Selector, selector
from sparcel.core.stream import WRITTEN, SparseStream
from sparcel.errors import InputError

STATE_HINT = "give what state_dict() of such a scheme returned"
"""How an error about a state ends."""


@dataclass(eq=False)
class Scheme(ABC):
    """Turns the gradients of all ranks into one update, the same on all ranks.

    A scheme serves one vector, because it remembers what that vector has not sent yet. `fresh`
    makes another scheme with the same settings.
    """

    steps: int = field(default=0, init=False, repr=False)
    """How many steps have taken effect."""
    _agreed: bool = field(default=False, init=False, repr=False)
    """Whether the ranks' gradients were compared in a step that a driver began."""
    _latest: tuple[object, Plan] | None = field(default=None, init=False, repr=False)
    """The plan of the step before, and what it was made for."""

    def __str__(self) -> str:
        """Return the call that makes it, with its density and what is not a default."""
        given = []
        for one in fields(self):
            value, default = getattr(self, one.name), one.default
            if isinstance(value, Format):
                value = value.name
            elif isinstance(value, Selector) and isinstance(default, str):
                default = selector(default)
            if one.repr and (one.name == "density" or repr(value) != repr(default)):
                given.append(f"{one.name}={value!r}")
        return f"{type(self).__name__}({', '.join(given)})"

    @property
    def memory(self) -> Tensor | None:
        """What this rank still owes to the updates, float32 or float64 ``[size]``; None if nothing.

        The step after next overwrites the tensor, so clone it to keep it.
        """
        return None

    @property
    def remembers(self) -> tuple[str, ...]:
        """The names of what `coordinates` holds after a step; empty for a dense scheme."""
        return ()

    @property
    def holds_back(self) -> bool:
        """Whether coordinates wait in memory for later steps; else it has roundings at most."""
        return bool(self.remembers)

    @property
    def momentum(self) -> float:
        """The momentum that the scheme corrects; 0 if it has none."""
        return 0.0

    @property
    def chosen(self) -> str | None:
        """The method that the scheme took last; None if it does not choose."""
        return None

    def connect(self, comm: Communicator) -> None:  # noqa: B027
        """Make the connections of the first step now, in a job of ``comm``; all ranks call.

        Schemes without nodes need none. If nodes have different numbers of ranks, it raises
        `InputError`.
        """

    def step(
        self,
        gradient: Tensor,
        comm: Group = None,
        out: Tensor | None = None,
        request: Request | None = None,
        in_place: bool = False,
    ) -> Tensor:
        """Return the average over ranks of the coordinates that the scheme sends, and commit.

        Parameters
        ----------
        gradient
            ``[size]``, contiguous, any float dtype. Left as it was, unless ``in_place``.
        comm
            A sparcel communicator, a torch process group, an MPI communicator, or None for torch's
            default group; all its ranks call.
        out
            Where to write the update; a new tensor like ``gradient`` by default. ``gradient`` does
            what ``in_place`` does.
        request
            Settings of this step.
        in_place
            Write the update to ``gradient``, without ``out``. After an error it may hold anything.

        Returns
        -------
        Tensor
            ``[size]``, the gradient's dtype. All NaN if any rank's vector or the average is not
            finite; the memory then stays as it was.

        Raises
        ------
        InputError, MismatchError, CommunicationError
            The memory stays as it was.
        """
        self._check(gradient)
        ranks = resolve(comm, gradient.device)
        if checked_flag(in_place, "in_place") and out is not None:
            raise InputError("in_place=True writes the update to the gradient; leave out out=")
        own = gradient.detach()
        if out is None:
            update = own if in_place else torch.empty_like(own)
        else:
            check_like(out, own, tuple(own.shape))
            update = out
        self._transact(own, ranks, request, own if own.is_set_to(update) else update)
        return gradient if in_place else update

    def step_stream(
        self, gradient: Tensor, comm: Group = None, request: Request | None = None
    ) -> SparseStream:
        """Do a step and return its update as a stream, for optimisers that apply it sparsely.

        Parameters and errors are those of `step`.

        Returns
        -------
        SparseStream
            The coordinates that came back, in the gradient's dtype; sparse unless their sum became
            dense. Empty and not ``finite`` if any rank's vector or the average is not finite; the
            memory then stays as it was.
        """
        self._check(gradient)
        ranks = resolve(comm, gradient.device)
        return self._transact(gradient.detach(), ranks, request, None)

    def begin(
        self,
        gradient: Tensor,
        comm: Communicator,
        request: Request | None = None,
        in_place: bool = False,
    ) -> Outcome:
        """Do the step except for `commit`, inside a job of ``comm``.

        For drivers of several vectors, which commit all of them or none. With ``in_place`` the
        update is written to ``gradient``, as `step` does; the average is then `WRITTEN`, and of a
        step that is not finite the gradient may hold anything. The ranks' gradients are compared in
        this scheme's first step only, also if it has loaded a state, where an exchange alone would
        not.
        """
        out = gradient if in_place else None
        outcome = self._begin(gradient, comm, request or Request(), out, not self._agreed)
        self._agreed = True
        return outcome

    def _begin(
        self,
        gradient: Tensor,
        comm: Communicator,
        request: Request,
        out: Tensor | None,
        agree: bool,
    ) -> Outcome:
        """Do the step except for `commit`; the update is written to ``out``, if given."""
        # Ranks that loaded states of different steps, or only some of which loaded one, differ.
        now = f"step={self.steps}"
        if self.remembers and request.scale != 1:  # without memory it concerns a rank's flush alone
            now += f", scale={request.scale}"
        plan = self.plan(gradient, comm, request)
        step = Step(gradient, comm, request, plan, out)
        return comm.call(plan.call.at(now), partial(self._exchanged, step, agree))

    def _exchanged(self, step: Step, agree: bool) -> Outcome:
        """Do what `_begin` does, inside the call that the ranks compare."""
        if agree:
            self._agree(step.gradient, step.comm)
        outcome, out = self.reduce(step), step.out
        if out is None:
            return outcome
        average = outcome.average
        if average.indices is not None and average.finite is not False:
            with profiled("update"):
                if out is step.gradient:  # `reduce` has left it zero
                    kernels.scatter(out, average.indices, average.values)
                else:
                    average.to_dense(out=out)
        return outcome._replace(average=WRITTEN)

    def plan(self, gradient: Tensor, comm: Communicator, request: Request) -> Plan:
        """Return what the step does; the plan of the step before, if nothing has changed."""
        terms = (
            *(gradient.numel(), gradient.dtype, comm.size, comm.rates, request.ranks),
            *(tuple(request.layers), tuple(request.apart), request.tensors),
            *(_settings_of(type(self))(self), self._plan_terms(gradient, request)),
        )
        if self._latest is None or self._latest[0] != terms:
            self._latest = terms, self._planned(gradient, comm, request)
        return self._latest[1]

    def _plan_terms(self, gradient: Tensor, request: Request) -> object:
        """Return what else is another once the scheme has another plan."""
        return None

    def _planned(self, gradient: Tensor, comm: Communicator, request: Request) -> Plan:
        """Return what steps do from now on."""
        size = gradient.numel()
        call = self._call(gradient, comm, request, {})
        return Plan(call, request.divisor(comm), size, size)

    @abstractmethod
    def reduce(self, step: Step) -> Outcome:
        """Exchange, and return the average over the ranks; `commit` follows as after `begin`.

        A dense average is written to the step's ``out``. If that is the gradient itself and the
        average is sparse, it is zero afterwards.
        """

    def commit(self, outcome: Outcome) -> None:
        """Make a step take effect, unless a vector was not finite."""
        if truth(outcome.finite):
            self._take_effect()

    def _take_effect(self) -> None:
        """Remember what a finite step leaves."""
        self.steps += 1

    def fresh(self) -> Self:
        """Return a scheme with the same settings and nothing remembered."""
        return replace(self)

    def coordinates(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Return the state of the coordinates ``[start, stop)``, by name, without copying."""
        return {}

    def forget(self) -> None:
        """Set all that is remembered of the coordinates to zero."""
        for part in self.coordinates().values():
            part.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state that a later run needs: the memory, the number of steps."""
        copies = {name: part.clone() for name, part in self.coordinates().items()}
        return {"steps": self.steps, "memory": None, **copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; tensors are copied.

        Raises
        ------
        InputError
            When an entry is missing, or has a value that such a scheme would not have saved;
            nothing changes then.
        """
        check_type(state, Mapping, "state", STATE_HINT)
        self._check_state(state)
        self.restore(_owed_in(state))

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `InputError` unless the scheme can go on from a state."""
        checked_filter(state.get("beta", 1.0), "the state's 'beta'", STATE_HINT)
        for key in ("steps", "memory"):
            if key not in state:
                raise InputError(f"the state has no {key!r}; {STATE_HINT}")
        checked_whole(state["steps"], "the state's 'steps'", at_least=0, hint=STATE_HINT)
        sizes = {}
        for key in ("memory", "velocity"):
            if state.get(key) is not None:
                _check_part(state[key], f"the state's {key!r}")
                sizes[key] = state[key].numel()
        if sizes and not self.remembers:
            raise InputError(
                f"the state has a {next(iter(sizes))!r}, which {self!r} would drop; load it for a"
                " scheme with memory, or into an Averager, which pays what is owed"
            )
        if sizes.get("velocity", sizes.get("memory")) != sizes.get("memory"):
            raise InputError(
                f"the state's 'velocity' must be as long as its memory, got {sizes}; {STATE_HINT}"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that was checked already."""
        self.steps = int(state["steps"])

    def _transact(
        self,
        gradient: Tensor,
        comm: Communicator,
        request: Request | None,
        out: Tensor | None,
    ) -> SparseStream:
        """Begin a step and commit it; return the average.

        All of it is one job, so ranks that find a fault tell the others.
        """
        request = request or Request()
        check_type(request, Request, "request")

        def job() -> SparseStream:
            begun = self._begin(gradient, comm, request, out, agree=True)
            comm.confirm()
            (outcome,), finite = request.costs.settle([begun])
            if finite:
                self.commit(outcome)
                return outcome.average
            if out is not None:
                out.fill_(math.nan)
            return outcome.average.void_like()

        return comm.run(job)

    def _call(
        self, gradient: Tensor, comm: Communicator, request: Request, more: dict[str, object]
    ) -> Call:
        """Describe a step by what all ranks must share, but for its number."""
        facts = {"size": gradient.numel(), "dtype": gradient.dtype}
        facts |= {"divisor": request.divisor(comm), **more}
        return Call.of(f"{self!r}.step", facts | named(request.tensors))

    def _check(self, gradient: Tensor) -> None:
        """Raise `InputError` unless a step can take ``gradient``."""
        check_type(gradient, Tensor, "gradient")
        if gradient.ndim != 1 or gradient.dtype not in FLOAT_DTYPES or not gradient.is_contiguous():
            raise InputError(
                f"a gradient is a contiguous one-dimensional float tensor, got {gradient.dtype} of"
                f" shape {tuple(gradient.shape)}, strides {gradient.stride()}; flatten it first"
            )

    def _agree(self, gradient: Tensor, comm: Communicator) -> None:  # noqa: B027
        """Compare the ranks' gradients, in a scheme whose exchange does not."""


@lru_cache
def _settings_of(kind: type[Scheme]) -> Callable[[Scheme], object]:
    """Return what tells the settings of schemes of this kind."""
    return attrgetter("__class__", *(one.name for one in fields(kind) if one.repr))


def _owed_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state whose memory is what is owed; in 0.1.0 it was that times ScaleCom's β."""
    beta, memory = float(state.get("beta", 1.0)), state.get("memory")
    if memory is None or beta == 1:
        return state
    rest = {name: part for name, part in state.items() if name != "beta"}
    return {**rest, "memory": saturate(memory / beta)}


def _check_part(part: object, name: str) -> None:
    """Raise `InputError` unless ``part`` can be the memory or the velocity of a vector."""
    check_part(part, name, None, STATE_HINT)
    assert isinstance(part, Tensor)
    if part.dtype != wide_dtype(part.dtype):
        raise InputError(f"{name} must be float32 or float64, got {part.dtype}; {STATE_HINT}")
    if not all_finite(part):
        raise InputError(
            f"{name} must be finite, got NaN or Inf, which would stay in the memory; load a state"
            " that was saved before"
        )
