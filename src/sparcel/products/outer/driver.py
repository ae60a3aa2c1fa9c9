"""The driver of outer steps: counts inner steps, exchanges when one is due, and goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from sparcel.core.comm import Job, SimulatedCommunicator
from sparcel.core.training import Averager, Stats
from sparcel.errors import CommunicationError, MismatchError, few, warn
from sparcel.products.outer.island import Ranks
from sparcel.products.outer.islands import Elastic, Fixed, Islands
from sparcel.products.outer.method import Method, Pace, Weights
from sparcel.products.outer.shared import Shared, checked, copied, of_rank
from sparcel.products.outer.vectors import Moments, Vector

Poison = Literal["leave out", "void"]
"""What becomes of an outer step if an island's pseudo-gradient holds NaN or Inf."""

Outcome = Literal["done", "void", "again", "late"]
"""How an attempt at an outer step has ended."""

_AVERAGER = "averager."
"""What the names of an averager's entries begin with in a state."""

_OUTCOMES: tuple[Outcome | None, ...] = (None, "done", "void")
"""The outcomes that a state may hold, by their numbers there."""


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
        pace: Pace,
        poison: Poison,
        ranks: Ranks,
    ) -> None:
        self._shared, self._averager, self._islands = shared, averager, islands
        self._method, self._pace, self._poison, self._ranks = method, pace, poison, ranks
        self.steps, self.optimizer = 0, shared.optimizer
        self._clock = self._ends = 0
        """How many inner steps have been done, by which outer steps are due, and after how many the
        island goes on with what is under way."""
        self._visiting = False
        self._connected = islands.comm
        self._void = 0
        """How many attempts nothing was exchanged in, because of NaN or Inf."""
        self._under_way: Job[Outcome] | None = None
        self._finite, self._was_told = True, False
        self._spoilt: list[str] = []
        """What holds NaN or Inf of what this rank has moved."""
        self._changed = self._anew = False
        """Whether this island goes on from what is shared since the last `lead`, and whether it
        does because of NaN or Inf."""
        self._moments, self._averaged = Moments(), list[str]()
        """Second moments, and the parameters whose have become averages since the last `lead`."""
        self._undone = False
        """Whether the model was loaded from a checkpoint of before this island took over."""
        self._weights, self._weight = Weights(len(shared.fragments)), 0.0
        self._worker = ThreadPoolExecutor(1, "sparcel-outer")
        self._undo = ExitStack()
        for end in (averager.handle.close, ranks.close, islands.close, self._worker.shutdown):
            self._undo.callback(end)
        if islands.joined:
            self._received()
            self._put()
        self._tell()

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

    def count(self, amount: float) -> None:
        """Tell what this island learns from in an inner step: how many tokens, or samples.

        In an outer step, each island then counts by how much it has learned from since the last
        one. If no island tells, or not all do, all count alike. If an island has several ranks, all
        of them tell what they learn from together.
        """
        self._weights.count(amount)

    def stats(self) -> Stats:
        """Return what the outer steps have cost so far; the counts are this rank's."""
        stats = self._averager.handle.stats()
        return replace(stats, void_steps=stats.void_steps + self._void)

    def start(self, module: nn.Module) -> None:
        """Count inner steps from now on; see to it that nobody loads another model behind them."""
        self._lead()

        def loaded(*_: object) -> None:
            self._undone = self._islands.joined

        def redo(*_: object) -> None:
            if self._undone:
                self._put()

        model, undo = self._shared.model, self._undo.callback
        undo(module.register_load_state_dict_post_hook(loaded).remove)
        undo(model.optimizers[0].register_step_pre_hook(redo).remove)
        undo(model.after_steps(self.advance))

    @torch.no_grad()
    def advance(self) -> None:
        """Count an inner step, and do what is due after it; optimisers call it."""
        self._clock += 1
        try:
            if self._under_way is not None and self._clock >= self._ends:
                self._go_on()
            if self._under_way is None and self._is_due():
                self._begin()
        except BaseException:
            self._ranks.fail()
            self._islands.fail()
            raise
        self._lead()

    def _lead(self) -> None:
        """Tell ranks that hold the same as this one what has changed since the last call."""
        changed, anew = self._changed, self._anew
        self._ranks.lead(self.steps, self.islands, changed, anew, self._averaged)
        self._changed, self._anew, self._averaged = False, False, []

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
            self._shared.put(self._fragment, self._method.keep)
            self._shared.model.keep()
            self._averaged = self._moments.put()
        self.steps += 1
        self._pace.begin()
        self._islands.committed(self._clock)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return what this island needs to go on: what islands share, and its own memory.

        Save it with the state of the model and of the inner optimiser, between two inner steps. An
        exchange that is under way is waited for, but takes effect when it would have.

        Returns
        -------
        dict
            ``clock``, ``steps``, ``ends``, ``outcome``, ``finite``, ``place``, ``island``,
            ``order`` and ``at``, whole numbers; ``rate``, the outer optimiser's; ``counted``, what
            `count` was told since each fragment was exchanged; ``averaged``, whether each buffer
            is in the outer step that is under way; ``shared.{name}`` and
            ``momentum.{name}``, the same on all islands, DTensors if the parameters are; and the
            entries of `Handle.state_dict`. Among elastic islands, these are of a rank 0 of 1.
        """
        outcome = None if self._under_way is None else self._under_way.wait()
        if outcome in ("again", "late"):
            self._go_on()
            outcome = None
        memory = self._averager.handle.state_dict()
        if not isinstance(self._islands, Fixed):
            memory = of_rank(memory, 0, 1)
        return {
            **copied(self._entries(outcome).items(), self._ranks.shard),
            **{f"{_AVERAGER}{name}": tensor for name, tensor in memory.items()},
        }

    def _numbers(self, outcome: Outcome | None = None) -> dict[str, int]:
        return {
            "clock": self._clock,
            "steps": self.steps,
            "ends": self._ends,
            "outcome": _OUTCOMES.index(outcome),
            "finite": int(self._finite),
            **self._islands.numbers(),
        }

    def _entries(self, outcome: Outcome | None = None) -> dict[str, Tensor]:
        """Return the entries of a state but for the averager's, not copied."""
        return {
            **{name: torch.tensor(number) for name, number in self._numbers(outcome).items()},
            "rate": torch.tensor(self._shared.rate, dtype=torch.float64),
            "counted": self._weights.state,
            "averaged": torch.tensor(self._shared.buffers.averaged),
            **dict(self._shared.named()),
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
        found = checked(state, self._entries(), self._ranks.shard)
        comm, numbers = self._averager.comm, {name: int(found[name]) for name in self._numbers()}
        memory = {
            name.removeprefix(_AVERAGER): tensor
            for name, tensor in state.items()
            if name.startswith(_AVERAGER)
        }
        if not isinstance(self._islands, Fixed):
            memory = of_rank(memory, comm.rank, comm.size)
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
            tensor.copy_(found[name])
        self._shared.rate, self._weights.state = float(found["rate"]), found["counted"]
        self._shared.buffers.averaged = found["averaged"].tolist()
        self._pace.begin()
        self._clock, self.steps = numbers["clock"], numbers["steps"]
        outcome, self._ends = _OUTCOMES[numbers["outcome"]], numbers["ends"]
        self._under_way = None if outcome is None else _ended(outcome)
        self._finite = bool(numbers["finite"])
        self._tell()

    def close(self) -> None:
        """Exchange nothing more; the model stays as it is."""
        self._undo.close()

    @property
    def _fragment(self) -> list[Vector]:
        """What the next outer step is of."""
        return self._shared.fragments[self._turn]

    @property
    def _turn(self) -> int:
        """The number of the fragment that the next outer step is of."""
        return self.steps % len(self._shared.fragments)

    def _is_due(self) -> bool:
        """Tell whether an outer step is due, also because others wait for one who has just come."""
        is_due = self._pace.is_due(self._clock, self.steps)
        if self._pace.goes_by_time:  # an island's ranks count the same steps, not the same seconds
            is_due = bool(self._ranks.tell(is_due))
        return is_due or (self._visiting and self._islands.is_awaited())

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
        model, buffers = self._shared.model, self._shared.buffers
        model.look()
        self._weight = self._weights.move(self._turn)
        self._spoilt = [name for one in self._fragment for name in one.move(model.parameters)]
        self._finite = self._ranks.all(not self._spoilt)
        every, done = self._method.moments, self.steps // len(self._shared.fragments)
        if every and done % every == 0:
            self._moments.move(self._fragment, model.moments(), every * self._clock / (done + 1))
        else:
            self._moments.move((), {})
        averages = self._finite and self._turn == 0
        if spoilt := buffers.move(model.buffers if averages else {}):
            warn(
                f"the buffers {few(spoilt)} hold NaN or Inf: this island's do not count in their"
                " average, which it takes over"
            )

    @torch.no_grad()
    def _attempt(self) -> Outcome:
        """Exchange the fragment, and update what is shared of it."""
        islands, fragment = self._islands, self._fragment
        finite = arrived = decides = False

        def decide(ended_finite: bool) -> bool:
            nonlocal finite, arrived, decides
            decides = True
            arrived, finite = islands.decide(True, ended_finite)
            return arrived and finite

        if not islands.meet():
            return "late"
        try:
            self._exchange(fragment, decide)
        except CommunicationError:
            if isinstance(islands, Fixed) or decides:
                raise
            islands.decide(False, False)
        if not arrived:
            return "again"
        if not finite:
            return "void"
        self._shared.step(fragment)
        self._weights.step(self._turn)
        if self._method.decay != 1:
            self._decay(fragment, self._method.decay)
        return "done"

    def _exchange(self, fragment: Sequence[Vector], decide: Callable[[bool], bool]) -> None:
        """Average a fragment, and what goes with it, as far as islands decide that it counts."""
        averager, comm = self._averager, self._islands.comm
        if comm is not self._connected:
            averager.connect(comm, self.steps)
            self._connected = comm
        counting, own, moments = self._agree()
        if not counting or (counting < comm.size and self._poison == "void"):
            decide(False)
            self._void += 1
            return
        share = own * comm.size / counting  # memory counts once
        for vector in fragment:
            _scale(vector.moved, own if self._method.by_senders else share)
            averager.queue(vector.moved, vector.places)
        self._shared.buffers.queue(averager, share)
        self._moments.queue(averager, share, moments)
        averager.finish(decide)

    def _decay(self, fragment: Sequence[Vector], factor: float) -> None:
        """Multiply what this rank keeps back of a fragment."""
        self._averager.decay([name for one in fragment for name in one.places], factor)

    def _agree(self) -> tuple[int, float, list[bool]]:
        """Learn what all islands bring, if they share the same parameters.

        Return how many of them count, by how much this one is multiplied in their average, and
        which second moments all bring. The learning rate becomes that of the island which has taken
        part for longest.
        """
        comm, buffers = self._averager.comm, self._shared.buffers
        vectors = [*self._fragment, *(buffers.vectors if self._turn == 0 else ())]
        numbers = torch.tensor([self._shared.rate, self._weight], dtype=torch.float64)
        own = [*buffers.flags, *self._moments.flags]
        told = torch.tensor([self._digest(vectors), self._finite, *own])
        told = torch.cat([numbers.view(torch.int64), told])
        blocks = comm.run(
            lambda: comm.gather_blocks(told.view(torch.uint8), [told.nbytes] * comm.size)
        )
        all_told = blocks.view(torch.int64).view(comm.size, -1)
        rates, weights = all_told[:, :2].contiguous().view(torch.float64).t().tolist()
        digests, finite, *flags = all_told[:, 2:].t().tolist()
        others = [rank for rank, one in enumerate(digests) if one != digests[comm.rank]]
        if others:
            raise MismatchError(
                f"ranks {others} share other parameters than rank {comm.rank} after"
                f" {self.steps} outer steps; start them from one checkpoint, or with one seed, and"
                " see that their processors round alike"
            )
        rate = rates[self._islands.senior]
        if rate != self._shared.rate:
            if not self._was_told:
                warn(
                    f"this island's outer learning rate is {self._shared.rate:g}; it goes on with"
                    f" {rate:g}, the rate of the island that has taken part for longest"
                )
            self._was_told, self._shared.rate = True, rate
        counting = [weight for weight, counts in zip(weights, finite, strict=True) if counts]
        share = self._weights.share(counting, self._weight) if self._finite else 0.0
        buffers.averaged = [any(flag) for flag in flags[: len(buffers.flags)]]
        moments = [
            all(brings or not counts for brings, counts in zip(flag, finite, strict=True))
            for flag in flags[len(buffers.flags) :]
        ]
        return len(counting), share, moments

    def _digest(self, vectors: Sequence[Vector]) -> int:
        """Return what sums up shared values on all ranks of this island."""
        parts = self._ranks.gather(self._shared.digest(vectors))
        return sum(part * (2 * rank + 1) for rank, part in enumerate(parts)) % (1 << 62)

    def _catch_up(self) -> None:
        """Take over what the others hold, and keep what this island has moved if it may be kept."""
        assert isinstance(self._islands, Elastic), "a fixed group waits for all"
        shift = self._shared.shifting()
        kept = self._islands.take_over()
        if kept is None:  # the run may begin without those who were waited for
            return
        self._received()
        if not kept:
            for fragment in self._shared.fragments:
                self._decay(fragment, 0.0)
            self._put()
            warn(
                "this island goes on from what the others share, without what it had moved before:"
                " it did not begin with that, or another has loaded the same checkpoint"
            )
        elif not self._finite:
            self._begin_anew()
        else:
            shift()

    def _begin_anew(self) -> None:
        """Go on from what is shared, without what NaN or Inf have spoilt."""
        if self._spoilt:
            warn(
                f"{few(self._spoilt)} held NaN or Inf: this island goes on from what the islands"
                " share, and what it had moved since is lost"
            )
        self._put()
        self._shared.model.restore()
        self._shared.model.forget_spoilt()
        self._anew = True

    def _put(self) -> None:
        """Go on with what is shared."""
        self._shared.put()
        self._weights.forget()
        self._changed, self._undone = True, False

    def _received(self) -> None:
        """Begin with what an island of the run has sent."""
        self._shared.received()
        assert isinstance(self._islands, Elastic)
        self.steps = self._islands.steps
        self._clock = self._pace.due(self.steps)
        self._pace.begin()
        self._changed = self._visiting = True

    def _tell(self) -> None:
        """Tell what this island begins with, after `attach` or from a checkpoint."""
        if isinstance(self._islands, Elastic):
            self._islands.begin(self.steps, self._digest(self._shared.vectors))


def _scale(moved: Tensor, share: float) -> None:
    """Multiply a pseudo-gradient, which may hold NaN or Inf if it counts nothing."""
    if not share:
        moved.zero_()
    elif share != 1:
        moved.mul_(share)


def _ended(outcome: Outcome) -> Job[Outcome]:
    """Return an attempt that has ended."""
    ended = Job(lambda: outcome)
    ended.run()
    return ended
