"""What an averager and its handle share: the ranks, the memory, and what the steps have cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sparcel.comm import Call, Communicator
from sparcel.training.ahead import Ahead
from sparcel.training.policy import Treatment
from sparcel.training.residuals import Residuals
from sparcel.training.shard import Shard
from sparcel.training.stats import Costs


@dataclass(eq=False)
class Session:
    """The exchange of a training's gradients, from its first step to its end.

    Attributes
    ----------
    comm, device
        The ranks that average, and where the tensors are.
    everyone, owned
        The ranks on which steps take effect together: those that average, or with shards the ranks
        of all shards. The communicator again if it ends with the exchange.
    shard
        Which shard of the tensors this rank holds; None for all of them.
    residuals, treatment
        What is kept back of the tensors, and how each of them is exchanged.
    scaler, frontload, withhold_zeros
        As for `sparcel.training.Averager`.
    queueing
        Whether tensors of a step are queued.
    total, last, void_steps
        What all steps have cost, what the last one has, and how many had no effect.
    taken
        The magnitude that the last effective step took out of memory.
    ahead
        What tells where the memory would bring the parameters, if a driver has asked for it.
    closed
        Whether nothing can be exchanged any more.
    undo
        What undoes, at the end, what a driver has done to the user's objects.
    """

    comm: Communicator
    everyone: Communicator
    owned: Communicator | None
    shard: Shard | None
    device: torch.device
    residuals: Residuals
    treatment: Treatment
    scaler: torch.amp.GradScaler | None
    frontload: bool
    withhold_zeros: bool
    queueing: bool = False
    total: Costs = field(default_factory=Costs)
    last: Costs = field(default_factory=Costs)
    void_steps: int = 0
    taken: float = 0.0
    closed: bool = False
    ahead: Ahead | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)

    def agree(self, finite: bool) -> bool:
        """Return whether a step was finite on the ranks of all shards; all call, inside a job.

        The ranks that average the same shard know it of one another.
        """
        if self.everyone is self.comm:
            return finite
        call = Call.of("agree", {"step": self.residuals.steps})
        return all(self.everyone.call(call, lambda: self.everyone.gather_numbers(int(finite))))

    def account(self, step: Costs, effective: bool) -> None:
        """Add a step that ended to the statistics."""
        self.total, self.last = self.total + step, step
        if effective:
            self.taken = step.magnitude
        else:
            self.void_steps += 1

    def close(self) -> None:
        """Exchange nothing more, and undo what the driver has done."""
        self.closed = True
        try:
            while self.undo:
                self.undo.pop()()
        finally:
            if self.owned is not None:
                self.owned.close()
