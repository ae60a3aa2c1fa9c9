"""The driver of outer steps: counts inner steps, exchanges when one is due, and goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from sparcel.core.comm import Job, SimulatedCommunicator
from sparcel.core.training import Stats
from sparcel.errors import few, warn
from sparcel.products.outer.exchange import Exchange, Outcome
from sparcel.products.outer.island import Ranks
from sparcel.products.outer.islands import Elastic, Fixed
from sparcel.products.outer.method import Pace
from sparcel.products.outer.shared import checked, copied

_AVERAGER = "averager."
"""What the names of an averager's entries begin with in a state."""

_OUTCOMES: tuple[Outcome | None, ...] = (None, "done", "void")
"""The outcomes that a state may hold, by their numbers there."""


class Outer:
    """Exchanges what a model's parameters have moved, every so many steps of its optimiser.

    `attach` makes one.

    Attributes
    ----------
    optimizer
        The outer optimiser, whose learning rate may be changed alike on all islands.
    """

    def __init__(self, exchange: Exchange, pace: Pace, ranks: Ranks) -> None:
        self._exchange, self._pace, self._ranks = exchange, pace, ranks
        self._shared, self._averager = exchange.shared, exchange.averager
        self._islands, self._overlap = exchange.islands, exchange.method.overlap
        self.optimizer = self._shared.optimizer
        self._clock = self._ends = 0
        """How many inner steps have been done, by which outer steps are due, and after how many the
        island goes on with what is under way."""
        self._visiting = False
        self._under_way: Job[Outcome] | None = None
        self._changed = self._anew = False
        """Whether this island goes on from what is shared since the last `lead`, and whether it
        does because of NaN or Inf."""
        self._averaged = list[str]()
        """The parameters whose second moments have become averages since the last `lead`."""
        self._undone = False
        """Whether the model was loaded from a checkpoint of before this island took over."""
        self._worker = ThreadPoolExecutor(1, "sparcel-outer")
        self._undo = ExitStack()
        closing = (self._averager.handle.close, ranks.close, self._islands.close)
        for end in (*closing, self._worker.shutdown):
            self._undo.callback(end)
        if self._islands.joined:
            self._received()
            self._put()
        self._tell()

    @property
    def steps(self) -> int:
        """How many outer steps have been done, by all islands together; each is of one fragment."""
        return self._exchange.steps

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
        self._exchange.weights.count(amount)

    def stats(self) -> Stats:
        """Return what the outer steps have cost so far; the counts are this rank's."""
        stats = self._averager.handle.stats()
        return replace(stats, void_steps=stats.void_steps + self._exchange.void)

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
            self._exchange.move(self._clock)
            outcome = self._exchange.attempt()
        if outcome == "late":
            self._catch_up()
            return
        self._changed = True
        if not self._exchange.finite:
            self._begin_anew()
        elif outcome == "done":
            self._averaged = self._exchange.put()
        self._exchange.steps += 1
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
            memory = _of_rank(memory, 0, 1)
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
            "finite": int(self._exchange.finite),
            **self._islands.numbers(),
        }

    def _entries(self, outcome: Outcome | None = None) -> dict[str, Tensor]:
        """Return the entries of a state but for the averager's, not copied."""
        return {
            **{name: torch.tensor(number) for name, number in self._numbers(outcome).items()},
            "rate": torch.tensor(self._shared.rate, dtype=torch.float64),
            "counted": self._exchange.weights.state,
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
            tensor.copy_(found[name])
        self._shared.rate, self._exchange.weights.state = float(found["rate"]), found["counted"]
        self._shared.buffers.averaged = found["averaged"].tolist()
        self._pace.begin()
        self._clock, self._exchange.steps = numbers["clock"], numbers["steps"]
        outcome, self._ends = _OUTCOMES[numbers["outcome"]], numbers["ends"]
        self._under_way = None if outcome is None else _ended(outcome)
        self._exchange.finite = bool(numbers["finite"])
        self._tell()

    def close(self) -> None:
        """Exchange nothing more; the model stays as it is."""
        self._undo.close()

    def _is_due(self) -> bool:
        """Tell whether an outer step is due, also because others wait for one who has just come."""
        is_due = self._pace.is_due(self._clock, self.steps)
        if self._pace.goes_by_time:  # an island's ranks count the same steps, not the same seconds
            is_due = bool(self._ranks.tell(is_due))
        return is_due or (self._visiting and self._islands.is_awaited())

    def _begin(self) -> None:
        self._exchange.move(self._clock)
        self._visiting = False
        if self._overlap and not isinstance(self._averager.comm, SimulatedCommunicator):
            attempt = Job(self._exchange.attempt)
            self._worker.submit(attempt.run)
            self._under_way = attempt
        else:  # a simulated rank has one thread
            self._under_way = _ended(self._exchange.attempt())
        self._ends = self._clock + self._overlap
        if not self._overlap:
            self._go_on()

    def _catch_up(self) -> None:
        """Take over what the others hold, and keep what this island has moved if it may be kept."""
        assert isinstance(self._islands, Elastic), "a fixed group waits for all"
        shift = self._shared.shifting()
        kept = self._islands.take_over()
        if kept is None:  # the run may begin without those who were waited for
            return
        self._received()
        if not kept:
            self._exchange.forget()
            self._put()
            warn(
                "this island goes on from what the others share, without what it had moved before:"
                " it did not begin with that, or another has loaded the same checkpoint"
            )
        elif not self._exchange.finite:
            self._begin_anew()
        else:
            shift()

    def _begin_anew(self) -> None:
        """Go on from what is shared, without what NaN or Inf have spoilt."""
        if spoilt := self._exchange.spoilt:
            warn(
                f"{few(spoilt)} held NaN or Inf: this island goes on from what the islands share,"
                " and what it had moved since is lost"
            )
        self._put()
        self._shared.model.restore()
        self._shared.model.forget_spoilt()
        self._anew = True

    def _put(self) -> None:
        """Go on with what is shared."""
        self._shared.put()
        self._exchange.weights.forget()
        self._changed, self._undone = True, False

    def _received(self) -> None:
        """Begin with what an island of the run has sent."""
        self._shared.received()
        assert isinstance(self._islands, Elastic)
        self._exchange.steps = self._islands.steps
        self._clock = self._pace.due(self.steps)
        self._pace.begin()
        self._changed = self._visiting = True

    def _tell(self) -> None:
        """Tell what this island begins with, after `attach` or from a checkpoint."""
        if isinstance(self._islands, Elastic):
            self._islands.begin(self.steps, self._exchange.digest(self._shared.vectors))


def _of_rank(memory: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return an averager's state of one rank as that of another, of so many."""
    renamed = {
        re.sub(r"^(rank|velocity)\d+\.", rf"\g<1>{rank}.", name): tensor
        for name, tensor in memory.items()
    }
    return {**renamed, "world_size": torch.tensor(size)}


def _ended(outcome: Outcome) -> Job[Outcome]:
    """Return an attempt that has ended."""
    ended = Job(lambda: outcome)
    ended.run()
    return ended
