"""What the user of a running exchange holds: statistics, state for checkpoints, and its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparcel.comm import Call, Communicator, TorchCommunicator
from sparcel.cost import default_rates
from sparcel.errors import CommunicationError, InputError, known
from sparcel.schemes import Scheme, Settings, chosen_scheme
from sparcel.training import checkpoint
from sparcel.training.ahead import Ahead, Arrange, in_order
from sparcel.training.checks import check_nodes, check_switch
from sparcel.training.policy import Treatment
from sparcel.training.residuals import Residuals
from sparcel.training.stats import Costs, Stats
from sparcel.training.transaction import Transaction


class Handle:
    """Tells what an exchange has cost, saves and loads what it remembers, and ends it.

    ``owned`` is the communicator if it ends with the handle.
    """

    def __init__(
        self,
        comm: Communicator,
        owned: TorchCommunicator | None,
        residuals: Residuals,
        treatment: Treatment,
    ) -> None:
        self._comm, self._owned = comm, owned
        self._residuals, self._treatment = residuals, treatment
        self._total, self._last, self._void_steps = Costs(), Costs(), 0
        self._step: Transaction | None = None
        """The step that is being queued."""
        self._taken = 0.0
        """The magnitude that the last effective step took out of memory."""
        self.closed = False
        self._ahead: Ahead | None = None
        self._ends: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        costs, flush = self._total, self._residuals.flush
        sent = ""
        if costs.bytes_sent:
            mean = costs.bytes_sent / costs.steps / 1e6
            sent = f", {mean:.3g} MB sent in each, {costs.compression:.3g} times less than dense"
            sent += f"; in the last step {self._last.compression:.3g} times"
        method = f"{self.scheme}"
        if self._treatment.scope == "model":
            method += " over the whole model"
        if flush.owed:
            method += f", which flushes memory for {flush.steps} more steps,"
        return (
            f"<{method} on {self._comm.size} ranks over {self._comm.carrier};"
            f" tensors: {self._treatment.described()}; steps: {costs.steps}{sent}"
            f"{'; closed' if self.closed else ''}>"
        )

    @property
    def scheme(self) -> Scheme:
        """The scheme that exchanges the gradients; every vector has a fresh one like it."""
        return self._residuals.template

    @property
    def sparse(self) -> frozenset[str]:
        """Names of the tensors that are made sparse, by the scheme of now.

        Under momentum correction the optimiser's own momentum is for the others alone.
        """
        return frozenset(self._treatment.sparse)

    @property
    def eligible(self) -> frozenset[str]:
        """Names of the tensors that any scheme which selects makes sparse, also after a switch."""
        return frozenset(self._treatment.eligible)

    @property
    def chosen(self) -> dict[str, str]:
        """What the scheme ``"auto"`` chose last, by tensor; empty for all other schemes.

        Tensors of one vector share a choice. Small ones are exchanged separately, unless it is
        ``"dense"``.
        """
        return self._residuals.chosen()

    def stats(self) -> Stats:
        """Return what the steps have cost so far; the counts are this rank's."""
        return Stats(
            **vars(self._total),
            training_steps=self._residuals.steps,
            void_steps=self._void_steps,
            last=self._last,
            rates=(self._comm.rates or default_rates()).description,
        )

    def memory_norm(self) -> float:
        """Return the Euclidean norm of what this rank keeps back; this reads all of its memory.

        Under ScaleCom's filter β it is the norm of memory/β, which is what the rank still owes.
        """
        return math.hypot(*self._owed_norms(2))

    def memory_age(self) -> float:
        """Return how many steps what this rank keeps back waits; this reads all of its memory.

        The mean time that a gradient's magnitude spends in memory until it is applied, by Little's
        law (waiting = arrivals · time): the sum of |memory| over the sum of |x| that the last
        effective step took out of it. 0 if nothing is kept back; NaN if something is, and the last
        step took nothing out. The law is about a steady state: while memory fills, in the first
        1/density steps, the result is too large. Under ``gtopk`` and ``oktopk`` a rank also keeps
        what others have sent. One rank's figure then says little, and is NaN if the rank kept more
        than it sent.

        Source: J. D. C. Little, "A Proof for the Queuing Formula: L = λW", 1961.
        """
        waiting = math.fsum(self._owed_norms(1))
        if waiting == 0:
            return 0.0
        return waiting / self._taken if self._taken > 0 else math.nan

    def _owed_norms(self, order: int) -> list[float]:
        """Return the norm of what this rank owes, for each tensor that has memory."""
        parts = [self._residuals.of(name).get("memory") for name in self._treatment.eligible]
        norms = [torch.linalg.vector_norm(part, order) for part in parts if part is not None]
        return [float(norm) / self._residuals.filter for norm in norms]

    def _account(self, step: Costs, effective: bool) -> None:
        """Add a step that ended to the statistics."""
        self._total, self._last = self._total + step, step
        if effective:
            self._taken = step.magnitude
        else:
            self._void_steps += 1

    def switch(self, scheme_or_name: Scheme | str, **settings: Unpack[Settings]) -> None:
        """Exchange gradients by another scheme from the next step on; all ranks call.

        What memory owes stays owed, tensor by tensor. A scheme that remembers nothing, such as
        ``"dense"`` or ``"torus2d"``, flushes it: the next steps add it to the gradients that they
        exchange, in equal shares, and the memory is freed. Which tensors are made sparse, and at
        what density, follows the new scheme. Steps count on, also for a ``warmup``.

        Parameters
        ----------
        scheme_or_name
            A name that `sparcel.scheme` knows, or a scheme that it made.
        settings
            Settings of a scheme that is given by name: ``density=0.01``.

        Raises
        ------
        InputError
            While tensors are queued; for a scheme or a setting that does not exist; for nodes with
            different numbers of ranks; for a scheme that corrects another momentum, because memory
            is then a sum of velocities, and the optimiser must have another momentum too.
        MismatchError
            When the ranks' schemes differ.
        CommunicationError
            When a rank fails. After any error the scheme and the memory are as they were.
        """
        if self.closed:
            raise CommunicationError("the handle was closed; make a new one with the other scheme")
        if self._step is not None:
            raise InputError("tensors are queued; finish() that step before switch()")
        comm, scheme = self._comm, chosen_scheme(scheme_or_name, settings).fresh()
        call = Call.of("switch", {"scheme": scheme, "step": self._residuals.steps})
        comm.call(call, lambda: comm.gather_numbers(0))
        self.prepare(scheme)
        self._treatment = self._treatment.under(scheme)
        self._residuals.switch(scheme)
        if self._ahead is not None:
            self._ahead.warn_of_unknown()

    def prepare(self, *schemes: Scheme) -> None:
        """Find out whether the exchange can be switched to these schemes; all ranks call.

        The ranks of their nodes are connected, so that `switch` need not do it.

        Raises
        ------
        InputError
            For nodes with different numbers of ranks; for a scheme that corrects another momentum.
        """
        for scheme in schemes:
            check_switch(self.scheme, scheme)
            check_nodes(scheme, self._comm)

    def ahead(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer | None = None,
        arrange: Arrange = in_order,
    ) -> Ahead:
        """Return what tells where this rank's memory would bring parameters, which stay in place.

        Compute gradients with the values of its `moved`. The one object serves the whole training.
        See `Ahead` for what it does and why.

        Parameters
        ----------
        parameters
            The tensors to move, by the names that the averager has for them.
        optimizer
            What updates them; None if `Ahead.follow` will tell.
        arrange
            How the driver lays out what it queues.

        Raises
        ------
        InputError
            For a name that the averager does not have, or if there is such an object already, as
            `sparcel.attach` makes one.

        Warns
        -----
        SparcelWarning
            For an optimiser whose steps are not known, whose parameters are not moved.
        """
        if self._ahead is not None:
            raise InputError("the parameters of this exchange are moved ahead already")
        for name in parameters:
            known(name, self._treatment.tensors, "the name of a tensor to move ahead")
        self._ahead = Ahead(parameters, self._residuals, arrange)
        if optimizer is not None:
            self._ahead.follow(optimizer)
        return self._ahead

    def state_dict(self, saved_by: int | None = None) -> dict[str, Tensor]:
        """Return a copy of what this rank remembers, for `torch.distributed.checkpoint` and others.

        Parameters
        ----------
        saved_by
            To load a checkpoint that another number of ranks saved, give that number: the result
            then has room for all that this rank has to load.

        Returns
        -------
        dict
            ``rank{r}.{name}``: the memory that rank r has of a tensor, float32 or float64, flat, in
            the order of the queued vectors; zeros before the first step, and outside the shard
            that the rank serves in its node. ``velocity{r}.{name}``, under momentum correction,
            likewise. ``steps``, ``world_size``, ``flush``, which is 0 if no rank owes anything, and
            where the tensors lay in the vectors of the last step. A scheme without memory has
            ``rank{r}.{name}`` until all ranks have flushed theirs.
        """
        saved_by = self._comm.size if saved_by is None else saved_by
        comm, tensors = self._comm, self._treatment.eligible
        return checkpoint.collect(self._residuals, tensors, comm.rank, comm.size, saved_by)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return on rank 0 what all ranks remember; all ranks call, between two steps.

        For frameworks that save the state of rank 0 alone. Every rank loads the result whole.

        Returns
        -------
        dict
            On rank 0 the entries of all ranks' `state_dict`, on the CPU: the memory of P models.
            Empty on the other ranks, as torch's own full state dicts are. Tensors are gathered
            one by one, so no rank needs room for a second copy of more than one. `stats` leaves
            these messages out.

        Raises
        ------
        CommunicationError
            On all ranks, when one fails.
        """
        comm, tensors = self._comm, self._treatment.eligible
        call = Call.of("full_state_dict", {})
        return comm.call(call, lambda: checkpoint.gather(self._residuals, tensors, comm))

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Go on from what `state_dict` or `full_state_dict` returned, on any number of ranks.

        All ranks load what was saved after the same step. Rank r takes over what all old ranks r,
        r+P, r+2P, … remember; nothing that was owed is lost. Entries of other ranks are ignored,
        so every rank gives a full state whole. A velocity that was not saved starts at 0. The state
        may be that of another scheme: this is then a switch, see `switch`.

        Parameters
        ----------
        state
            Tensors on any device. Those that ``torch.load(..., mmap=True)`` returns are read from
            the file when they are needed, which saves reading the entries of other ranks.
        strict
            Whether entries that fit no tensor, and missing ones, are errors. If not, the memory
            concerned starts empty, or without the parts that are missing, and a warning says so.

        Raises
        ------
        InputError
            When an entry fits no tensor, or entries are missing, or the memory is a sum of
            velocities, and this scheme would have to flush it; the memory stays as it was.

        Notes
        -----
        Training continues bit by bit as if it had not been interrupted, unless the driver had laid
        out the tensors anew after it: a checkpoint of DDP's first step (the first two with
        ``static_graph``) was saved before DDP rebuilt its buckets. What is owed stays right in any
        layout. Dense sums of more than two ranks may round otherwise in DDP's first step after
        loading, as without sparcel. Thresholds and boundaries that were reused
        (``threshold="reuse"``, ``selector="reuse"``) are estimated anew.
        """
        comm, tensors = self._comm, self._treatment.eligible
        checkpoint.load(state, self._residuals, tensors, comm.rank, comm.size, strict)

    def meet(self) -> None:
        """Wait until all ranks have called; raise `CommunicationError` if one cannot."""
        self._comm.call(Call.of("meet", {}), lambda: self._comm.gather_numbers(0))

    def close(self) -> None:
        """End the communication thread; call it before the process group is destroyed.

        Nothing can be exchanged after that. A communicator that was passed as ``group`` stays open.
        """
        self.closed = True
        for end in self._ends:
            end()
        self._ends.clear()
        if self._owned is not None:
            self._owned.close()

    def on_close(self, end: Callable[[], None]) -> None:
        """Let `close` undo by ``end`` what a driver has done to the user's objects."""
        self._ends.append(end)
