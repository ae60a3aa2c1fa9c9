"""The driver of outer steps: counts inner steps, exchanges when one is due, and goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparcel._checks import check_type
from sparcel.comm import Job, SimulatedCommunicator
from sparcel.errors import CommunicationError, InputError, MismatchError, warn
from sparcel.outer.island import Island, forget_spoilt
from sparcel.outer.islands import Elastic, Fixed, Islands
from sparcel.outer.method import Method
from sparcel.outer.shared import Shared, Vector
from sparcel.training import Averager, Stats

Poison = Literal["leave out", "void"]
"""What becomes of an outer step if an island's pseudo-gradient holds NaN or Inf."""

Outcome = Literal["done", "void", "again", "late"]
"""How an attempt at an outer step has ended."""


_NUMBERS = ("clock", "steps", "ends", "outcome", "finite", "place", "island", "order", "at")
_OUTCOMES: tuple[Outcome | None, ...] = (None, "done", "void")
"""The outcomes that a state may hold, by their numbers there."""

_WAY_OUT = "give what outer.state_dict() returned for the same model and method"


class Outer:
    """Exchanges what a model's parameters have moved, every so many steps of its optimiser.

    `attach` makes one.

    Attributes
    ----------
    steps
        How many outer steps have been done, by all islands together; each is of one fragment.
    optimizer
        The outer optimiser, whose learning rate may be changed alike on all islands.
    """

    def __init__(
        self,
        shared: Shared,
        averager: Averager,
        islands: Islands,
        method: Method,
        every: int,
        poison: Poison,
        island: Island | None,
    ) -> None:
        self._shared, self._averager, self._islands = shared, averager, islands
        self._method, self._every, self._poison = method, every, poison
        self._island = island
        self.steps, self.optimizer = 0, shared.optimizer
        self._clock = 0
        """How many inner steps have been done, by which outer steps are due."""
        self._visiting = False
        self._connected = islands.comm
        self._under_way: Job[Outcome] | None = None
        self._ends = 0
        """After how many inner steps the island goes on with what is under way."""
        self._finite, self._was_told = True, False
        self._changed = self._anew = False
        """Whether this inner step has ended with what is shared, and because of NaN or Inf."""
        self._undone = False
        """Whether the model was loaded from a checkpoint of before this island took over."""
        self._inner: Sequence[Optimizer] = ()
        self._worker = ThreadPoolExecutor(1, "sparcel-outer")
        self._undo = ExitStack()
        self._undo.callback(averager.handle.close)
        self._undo.callback(islands.close)
        self._undo.callback(self._worker.shutdown)

    @property
    def shared(self) -> dict[str, Tensor]:
        """The parameters that islands share, by name, not copied.

        They are those of the latest exchange, which is waited for if it is under way.
        """
        if self._under_way is not None:
            self._under_way.wait()
        return self._shared.by_name()

    @property
    def islands(self) -> int:
        """How many islands the latest outer step was tried with."""
        return self._averager.comm.size

    def stats(self) -> Stats:
        """Return what the outer steps have cost so far; the counts are this rank's."""
        return self._averager.handle.stats()

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Count the steps of the last of these optimisers from now on."""
        self._inner = optimizers
        for hook in (
            optimizers[0].register_step_pre_hook(lambda *_: self._redo()),
            optimizers[-1].register_step_post_hook(lambda *_: self.advance()),
        ):
            self._undo.callback(hook.remove)

    def follow(self, model: nn.Module) -> None:
        """See to it that nobody loads another model behind this one's back."""

        def loaded(*_: object) -> None:
            self._undone = self._islands.joined

        self._undo.callback(model.register_load_state_dict_post_hook(loaded).remove)

    @torch.no_grad()
    def advance(self) -> None:
        """Count an inner step, and do what is due after it; optimisers call it."""
        self._clock += 1
        self._changed = self._anew = False
        try:
            if self._under_way is not None and self._clock >= self._ends:
                self._go_on()
            if self._under_way is None and (self._is_due() or self._is_awaited()):
                self._begin()
        except BaseException:
            if self._island is not None:
                self._island.fail()
            raise
        if self._island is not None:
            self._island.lead(self.steps, self._changed, self._anew)

    def _go_on(self) -> None:
        """Wait for the exchange that is under way, and go on with its outcome."""
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        outcome = under_way.wait()
        while outcome == "again":
            self._move()
            outcome = self._attempt()
        if outcome == "late":
            self._catch_up()
            return
        self._changed = True
        if not self._finite:
            self._begin_anew()
        elif outcome == "done":
            for vector in self._fragment:
                vector.put(self._method.keep)
        self.steps += 1
        self._islands.committed(self._clock)

    def join(self) -> None:
        """Begin from what the others share, which has been received."""
        self._received()
        self._put()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return what this island needs to go on: what islands share, and its own memory.

        Save it with the state of the model and of the inner optimiser, between two inner steps. An
        exchange that is under way is waited for, but takes effect when it would have.

        Returns
        -------
        dict
            ``clock``, ``steps``, ``ends``, ``outcome``, ``finite``, ``place``, ``island``,
            ``order`` and ``at``, whole numbers; ``rate``, the outer optimiser's;
            ``shared.{name}`` and ``momentum.{name}``, the same on all islands; and the entries of
            `Handle.state_dict`. Among elastic islands, these are of a rank 0 of 1.
        """
        outcome = None if self._under_way is None else self._under_way.wait()
        if outcome in ("again", "late"):
            self._go_on()
            outcome = None
        numbers = {
            "clock": self._clock,
            "steps": self.steps,
            "ends": self._ends,
            "outcome": _OUTCOMES.index(outcome),
            "finite": int(self._finite),
            **self._islands.numbers(),
        }
        memory = self._averager.handle.state_dict()
        if not isinstance(self._islands, Fixed):
            memory = _of_rank(memory, 0, 1)
        return {
            **{name: torch.tensor(number) for name, number in numbers.items()},
            "rate": torch.tensor(self._shared.rate, dtype=torch.float64),
            **{name: tensor.clone() for name, tensor in self._shared.named()},
            **{f"averager.{name}": tensor for name, tensor in memory.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned, on any number of islands; all of them call.

        The model and the inner optimiser have to go on from the same step. If a run has gone on
        without this island, it goes on from what the others share, and a warning says so: what it
        had moved and not sent is lost, since the others may have counted it. With a fixed group,
        rank r takes over the memory of all old ranks r, r+P, …, as `Handle.load_state_dict` says.

        Raises
        ------
        InputError
            When an entry is missing or does not fit.
        """
        check_type(state, Mapping, "state", _WAY_OUT)
        expected = dict.fromkeys((*_NUMBERS, "rate"), torch.zeros(())) | dict(self._shared.named())
        for name, tensor in expected.items():
            if name not in state:
                raise InputError(f"the state has no {name!r}; {_WAY_OUT}")
            if state[name].shape != tensor.shape:
                raise InputError(
                    f"the state's {name!r} must have shape {list(tensor.shape)}, got"
                    f" {list(state[name].shape)}; {_WAY_OUT}"
                )
        memory = {
            name.removeprefix("averager."): tensor
            for name, tensor in state.items()
            if name.startswith("averager.")
        }
        comm, numbers = self._averager.comm, {name: int(state[name]) for name in _NUMBERS}
        if not isinstance(self._islands, Fixed):
            memory = _of_rank(memory, comm.rank, comm.size)
        if isinstance(self._islands, Elastic) and not self._islands.resume(numbers):
            self._put()
            warn(
                f"the run has done {self.steps} outer steps, and the checkpoint is of"
                f" {numbers['steps']}: this island goes on from what the others share, and what it"
                " had moved until then and not sent is lost"
            )
            return
        self._averager.handle.load_state_dict(memory)
        self._undone = False
        for name, tensor in self._shared.named():
            tensor.copy_(state[name])
        self._shared.rate = float(state["rate"])
        self._clock, self.steps = numbers["clock"], numbers["steps"]
        outcome, self._ends = _OUTCOMES[numbers["outcome"]], numbers["ends"]
        self._under_way = None if outcome is None else _ended(outcome)
        self._finite = bool(numbers["finite"])
        self.begin()

    def close(self) -> None:
        """Exchange nothing more; the model stays as it is."""
        self._undo.close()

    @property
    def _fragment(self) -> list[Vector]:
        """What the next outer step is of."""
        fragments = self._shared.fragments
        return fragments[self.steps % len(fragments)]

    def _due(self, steps: int) -> int:
        """Return after how many inner steps an outer step is due."""
        return -(-steps * self._every // len(self._shared.fragments))

    def _is_due(self) -> bool:
        return self._clock >= self._due(self.steps + 1)

    def _is_awaited(self) -> bool:
        """Tell whether others wait for this island, which has come between two of their steps."""
        return self._visiting and self._islands.is_awaited()

    def _begin(self) -> None:
        self._move()
        self._visiting = False
        overlap = self._method.overlap
        if overlap and not isinstance(self._averager.comm, SimulatedCommunicator):
            attempt = Job(self._attempt)
            self._worker.submit(attempt.run)
            self._under_way = attempt
        else:  # a simulated rank has one thread
            self._under_way = _ended(self._attempt())
        self._ends = self._clock + overlap
        if not overlap:
            self._go_on()

    def _move(self) -> None:
        """Find out what this island has moved of the fragment."""
        finite = [vector.move() for vector in self._fragment]
        self._finite = all(finite)
        if self._island is not None:
            self._finite = self._island.all(self._finite)

    @torch.no_grad()
    def _attempt(self) -> Outcome:
        """Exchange the fragment, and update what is shared of it."""
        islands, averager, fragment = self._islands, self._averager, self._fragment
        finite, bad, arrived = True, 0, False

        def decide(ended_finite: bool) -> bool:
            nonlocal finite, arrived
            finite, arrived = ended_finite, islands.decide(True)
            return arrived

        if not islands.meet():
            return "late"
        try:
            if islands.comm is not self._connected:
                averager.connect(islands.comm, self.steps)
                self._connected = islands.comm
            bad = self._agree()
            void = bad == averager.comm.size or (bad > 0 and self._poison == "void")
            if void:
                decide(False)
            else:
                share = averager.comm.size / (averager.comm.size - bad)
                for vector in fragment:
                    if not self._finite:
                        vector.moved.zero_()
                    elif bad:  # the average is over those that count, and memory counts once
                        averaged = vector.optimized if self._method.by_senders else 0
                        vector.moved[averaged:].mul_(share)
                    averager.queue(vector.moved, vector.places)
                averager.finish(decide)
        except CommunicationError:
            if isinstance(islands, Fixed):
                raise
            islands.decide(False)
        if not arrived:
            return "again"
        if not finite:
            return "void"
        self._shared.step(fragment)
        if self._method.decay != 1:
            averager.decay([name for one in fragment for name in one.places], self._method.decay)
        return "done"

    def _agree(self) -> int:
        """Return how many islands hold NaN or Inf, if all share the same parameters.

        The learning rate becomes that of the island which has taken part for longest.
        """
        comm = self._averager.comm
        told = torch.tensor([self._shared.digest(self._fragment), self._finite, 0])
        told[2:].view(torch.float64).fill_(self._shared.rate)
        blocks = comm.run(
            lambda: comm.gather_blocks(told.view(torch.uint8), [told.nbytes] * comm.size)
        )
        all_told = blocks.view(torch.int64).view(comm.size, -1)
        digests, finite = all_told[:, 0].tolist(), all_told[:, 1].tolist()
        others = [rank for rank, one in enumerate(digests) if one != digests[comm.rank]]
        if others:
            raise MismatchError(
                f"ranks {others} share other parameters than rank {comm.rank} after"
                f" {self.steps} outer steps; start them from one checkpoint, or with one seed, and"
                " see that their processors round alike"
            )
        rate = float(all_told[self._islands.senior, 2:].view(torch.float64))
        if rate != self._shared.rate:
            if not self._was_told:
                warn(
                    f"this island's outer learning rate is {self._shared.rate:g}; it goes on with"
                    f" {rate:g}, the rate of the island that has taken part for longest"
                )
            self._was_told, self._shared.rate = True, rate
        return finite.count(0)

    def _catch_up(self) -> None:
        """Take over what the others have done without this island, and keep what it has moved."""
        assert isinstance(self._islands, Elastic), "a fixed group waits for all"
        before = [vector.shared.clone() for vector in self._shared.vectors]
        kept = self._islands.take_over()
        self._received()
        if not kept:
            for fragment in self._shared.fragments:
                names = [name for one in fragment for name in one.places]
                self._averager.decay(names, 0.0)
            self._put()
            warn(
                "this island goes on from what the others share; what it had moved before is lost,"
                " since it did not begin with that"
            )
        elif not self._finite:
            self._begin_anew()
        else:
            for vector, old in zip(self._shared.vectors, before, strict=True):
                vector.shift(old)

    def _begin_anew(self) -> None:
        """Go on from what is shared, without what NaN or Inf have spoilt."""
        self._put()
        forget_spoilt(self._inner)
        self._anew = True

    def _put(self) -> None:
        """Go on with what is shared."""
        for vector in self._shared.vectors:
            vector.put()
        self._changed, self._undone = True, False

    def _redo(self) -> None:
        """Go on with what is shared if an older model was loaded since."""
        if self._undone:
            self._put()

    def _received(self) -> None:
        """Begin with what an island of the run has sent."""
        self._shared.received()
        assert isinstance(self._islands, Elastic)
        self.steps = self._islands.steps
        self._clock = self._due(self.steps)
        self._changed = self._visiting = True

    def begin(self) -> None:
        """Begin with what is shared, as after `attach` or from a checkpoint."""
        if isinstance(self._islands, Elastic):
            self._islands.begin(self.steps, self._shared.digest(self._shared.vectors))


def _ended(outcome: Outcome) -> Job[Outcome]:
    """Return an attempt that has ended."""
    ended = Job(lambda: outcome)
    ended.run()
    return ended


def _of_rank(memory: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return the entries of the one rank that a state has, as those of a rank of so many."""
    renamed = {
        re.sub(r"^(rank|velocity)\d+\.", rf"\g<1>{rank}.", name): tensor
        for name, tensor in memory.items()
    }
    return {**renamed, "world_size": torch.tensor(size)}
