"""What an averager and its handle share: the ranks, the memory, and what the steps have cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from sparcel.comm import Communicator, TorchCommunicator, ring_bytes
from sparcel.errors import CommunicationError
from sparcel.schemes import Request
from sparcel.training.ahead import Ahead
from sparcel.training.layout import Packed, joined, zeros_in
from sparcel.training.policy import Treatment
from sparcel.training.residuals import Residuals
from sparcel.training.stats import Costs
from sparcel.training.transaction import Transaction


@dataclass(eq=False)
class Exchange:
    """An exchange between ranks, from its first step to its end.

    Attributes
    ----------
    comm, owned, device
        The ranks, the communicator again if it ends with the exchange, and where the tensors are.
    residuals, treatment
        What is kept back of the tensors, and how each of them is exchanged.
    scaler, frontload, withhold_zeros
        As for `sparcel.training.Averager`.
    step
        The step that is being queued.
    total, last, void_steps
        What all steps have cost, what the last one has, and how many had no effect.
    taken
        The magnitude that the last effective step took out of memory.
    ahead
        What tells where the memory would bring the parameters, if a driver has asked for it.
    ends
        What undoes, at the end, what a driver has done to the user's objects.
    """

    comm: Communicator
    owned: TorchCommunicator | None
    device: torch.device
    residuals: Residuals
    treatment: Treatment
    scaler: torch.amp.GradScaler | None
    frontload: bool
    withhold_zeros: bool
    step: Transaction | None = None
    total: Costs = field(default_factory=Costs)
    last: Costs = field(default_factory=Costs)
    void_steps: int = 0
    taken: float = 0.0
    closed: bool = False
    ahead: Ahead | None = None
    ends: list[Callable[[], None]] = field(default_factory=list)

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
        for end in self.ends:
            end()
        self.ends.clear()
        if self.owned is not None:
            self.owned.close()

    def open(self, names: Iterable[str]) -> Transaction:
        """Return the step that is being queued, with these tensors added to it."""
        if self.closed:
            raise CommunicationError("the averager was closed; make a new one to exchange more")
        self.step = self.step or Transaction(self.comm, self.device, self.residuals.flush)
        self.step.include(names)
        return self.step

    def take(self, step: Transaction, packed: Packed) -> None:
        """Exchange a vector, or hold it if one selection is made over all vectors."""
        step.meter.dense_bytes += ring_bytes(packed.vector.nbytes, self.comm.size)
        if self.treatment.scope == "model" and packed.large:
            step.held.append(packed)
        else:
            self._exchange(step, packed)

    def exchange_held(self, step: Transaction) -> None:
        """Exchange the vectors that were held as one."""
        if step.held:
            whole, step.copies = joined(step.held)
            self._exchange(step, whole)

    def _exchange(self, step: Transaction, packed: Packed) -> None:
        """Replace the tensors in a vector by their updates, except for small ones if those wait."""
        vector, small, large = packed.vector, packed.small, tuple(packed.large)
        places = [vector[piece.start : piece.stop] for piece in small]
        gradients = [place.clone() for place in places]
        sent_whole = False
        for served, flat in self.residuals.vectors(large, vector) if large else ():
            # A vector in another layout has no small tensors.
            apart = [(piece.start, piece.stop) for piece in small] if flat is vector else []
            withheld = zeros_in(flat, served.pieces) if self.withhold_zeros else []
            request = Request(
                served.layers,
                withheld,
                apart,
                front_loaded=self.frontload,
                meter=step.meter,
            )
            step.exchange_vector(served, flat, request, self._scale())
            sent_whole = flat is vector and served.scheme.sent_whole
        if not sent_whole:
            step.take_small(places, gradients)

    def _scale(self) -> float:
        """Return what a GradScaler has multiplied gradients by; 1 if it does not matter.

        Asked in the exchange and not while computing, which would have to wait for a GPU to answer.
        """
        owes = self.treatment.selects or self.residuals.flush.owed
        return 1.0 if self.scaler is None or not owes else self.scaler.get_scale()
