"""What the user of a running exchange holds: statistics, state for checkpoints, and its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.comm import Call
from sparcel.core.cost import default_rates
from sparcel.core.device import read
from sparcel.core.regions import RETURNED
from sparcel.core.schemes import Bidirectional, Costs, Scheme, Settings, chosen_scheme
from sparcel.core.training import checkpoint
from sparcel.core.training.transaction import Session
from sparcel.errors import CommunicationError, InputError

_AMOUNTS = (
    "messages_sent",
    "bytes_sent",
    "bytes_received",
    "dense_bytes",
    "select_seconds",
    "communicate_seconds",
)
_RATIOS = ("compression", "density_before", "density_after")


class Handle:
    """Tells what an exchange has cost, saves and loads what it remembers, and ends it.

    `sparcel.attach` returns one, and `sparcel.training.Averager` has one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        session = self._session
        costs, last, flush = session.total, session.last, session.residuals.flush
        sent = ""
        if costs.bytes_sent:
            mean = costs.bytes_sent / costs.steps / 1e6
            sent = f", {mean:.3g} MB sent in each, {costs.compression:.3g} times less than dense"
            sent += f"; in the last step {last.compression:.3g} times"
            mean, now = (100 * one.asked / max(1, one.coordinates) for one in (costs, last))
            sent += f"; asked for {mean:.3g} % of the coordinates, {now:.3g} % in the last step"
        method, comm = f"{self.scheme}", session.ranks.comm
        if isinstance(self.scheme, Bidirectional) and self.scheme.returned is None:
            back = min(1.0, RETURNED * self.scheme.density)
            method += f", which returns {100 * back:.3g} % of the sums,"
        if session.treatment.scope == "model":
            method += " over the whole model"
        if flush.owed:
            method += f", which flushes memory for {flush.steps} more steps,"
        return (
            f"<{method} on {comm.size} ranks over {comm.carrier};"
            f" tensors: {session.treatment.described()}; steps: {costs.steps}{sent}"
            f"{'; closed' if self.closed else ''}>"
        )

    @property
    def closed(self) -> bool:
        """Whether the exchange has ended."""
        return self._session.closed

    @property
    def scheme(self) -> Scheme:
        """The scheme that exchanges the gradients; every vector has a fresh one like it."""
        return self._session.residuals.template

    @property
    def sparse(self) -> frozenset[str]:
        """Names of the tensors that are made sparse, by the scheme of now.

        Under momentum correction the optimiser's own momentum is for the others alone.
        """
        return frozenset(self._session.treatment.sparse)

    @property
    def eligible(self) -> frozenset[str]:
        """Names of the tensors that any scheme which selects makes sparse, also after a switch."""
        return frozenset(self._session.treatment.eligible)

    @property
    def chosen(self) -> dict[str, str]:
        """What the scheme ``"auto"`` chose last, by tensor; empty for all other schemes.

        Tensors of one vector share a choice. Small ones are exchanged separately, unless it is
        ``"dense"``.
        """
        return self._session.residuals.chosen()

    def stats(self) -> Stats:
        """Return what the steps have cost so far; the counts are this rank's."""
        session = self._session
        return Stats(
            **vars(session.total),
            training_steps=session.residuals.steps,
            void_steps=session.void_steps,
            last=session.last,
            rates=(session.ranks.comm.rates or default_rates()).description,
        )

    def memory_norm(self) -> float:
        """Return the Euclidean norm of what this rank keeps back; this reads all of its memory."""
        squares = read(kernels.sums_of_squares(self._memories())).tolist()
        norm = math.sqrt(sum(squares))
        if math.isinf(norm):  # the squares of float64 may overflow
            norm = math.hypot(*map(kernels.norm, self._memories()))
        return norm

    def memory_age(self) -> float:
        """Return how many steps what this rank keeps back waits; this reads all of its memory.

        The mean time that a gradient's magnitude spends in memory until it is applied, by Little's
        law (waiting = arrivals · time): the sum of ``|memory|`` over the sum of ``|x|`` that the
        last effective step took out of it. 0 if nothing is kept back; NaN if something is, and the
        last step took nothing out. The law is about a steady state: while memory fills, in the
        first 1/density steps, the result is too large. Under ``gtopk`` and ``oktopk`` a rank also
        keeps what others have sent. One rank's figure then says little, and is NaN if the rank kept
        more than it sent.

        Source: J. D. C. Little, "A Proof for the Queuing Formula: L = λW", 1961.
        """
        sums = [torch.linalg.vector_norm(part, 1) for part in self._memories()]
        waiting = sum(read(torch.stack(sums)).tolist()) if sums else 0.0
        taken = self._session.taken
        if waiting == 0:
            return 0.0
        return waiting / taken if taken > 0 else math.nan

    def _memories(self) -> list[Tensor]:
        """Return the memory of each tensor that has some, flat."""
        of = self._session.residuals.of
        parts = [of(name).get("memory") for name in self.eligible]
        return [part for part in parts if part is not None]

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
        session = self._session
        if session.closed:
            raise CommunicationError("the handle was closed; make a new one with the other scheme")
        if session.step is not None:
            raise InputError("tensors are queued; finish() that step before switch()")
        scheme = chosen_scheme(scheme_or_name, settings).fresh()
        session.ranks.gather("switch", scheme=scheme, step=session.residuals.steps)
        self.prepare(scheme)
        session.treatment = session.treatment.under(scheme)
        session.residuals.switch(scheme)
        if session.ahead is not None:
            session.ahead.warn_of_unknown()

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
            self._session.ranks.connect_nodes(scheme)

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
            ``rank{r}.{name}`` until all ranks have flushed theirs. Where ranks hold shards of the
            tensors, r is the number of a replica, and what it remembers is a DTensor, sharded as
            the parameter is; places in vectors are left out.
        """
        return checkpoint.collect(self._session, saved_by)

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
        InputError
            When the tensors are shards.
        CommunicationError
            On all ranks, when one fails.
        """
        session, comm = self._session, self._session.ranks.comm
        if session.ranks.shard is not None:
            raise InputError(
                "no rank has room for the memory of a model that is sharded; save state_dict() by"
                " torch.distributed.checkpoint, which loads it on other numbers of ranks too"
            )
        return comm.call(Call.of("full_state_dict", {}), lambda: checkpoint.gather(session))

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Go on from what `state_dict` or `full_state_dict` returned, on any number of ranks.

        All ranks load what was saved after the same step. Rank r takes over what all old ranks r,
        r+P, r+2P, … remember, times P over their number, because updates are averages: what was
        owed to the model stays owed. Entries of other ranks are ignored, so every rank gives a full
        state whole. A velocity that was not saved starts at 0. The state may be that of another
        scheme: this is then a switch, see `switch`.

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
            When an entry has a value that no state has, or one so large that a sum over the ranks
            would overflow. With ``strict``, also when an entry fits no tensor, or entries are
            missing, or the memory is a sum of velocities, and this scheme would have to flush it.
            While tensors are queued. The memory then stays as it was.

        Notes
        -----
        Training continues bit by bit as if it had not been interrupted, unless the driver had laid
        out the tensors anew after it: a checkpoint of DDP's first step (the first two with
        ``static_graph``) was saved before DDP rebuilt its buckets. What is owed stays right in any
        layout. Dense sums of more than two ranks may round otherwise in DDP's first step after
        loading, as without sparcel. Thresholds and boundaries that were reused
        (``threshold="reuse"``, ``selector="reuse"``) are estimated anew.
        """
        if self._session.step is not None:
            raise InputError("tensors are queued; finish() that step before load_state_dict()")
        checkpoint.load(state, self._session, strict)

    def meet(self) -> None:
        """Wait until all ranks have called; raise `CommunicationError` if one cannot."""
        self._session.ranks.gather("meet")

    def close(self) -> None:
        """End the communication thread; call it before the process group is destroyed.

        Nothing can be exchanged after that. A communicator that was passed as ``group`` stays open.
        """
        self._session.close()


def check_switch(before: Scheme, after: Scheme) -> None:
    """Raise `InputError` unless what one scheme remembers means the same to another."""
    if before.momentum != after.momentum:
        raise InputError(
            f"{before} corrects momentum={before.momentum:g}, and {after} corrects"
            f" {after.momentum:g}: memory is a sum of velocities or of gradients, and the"
            " optimiser's momentum has to fit; switch between schemes of the same momentum"
        )


@dataclass
class Stats(Costs):
    """What the steps since the exchange was made have cost on this rank, and the last of them.

    Attributes
    ----------
    training_steps
        How many steps of the training took effect, those before a checkpoint included.
    void_steps
        How many of ``steps`` had no effect, because some rank's gradient held NaN or Inf.
    last
        What the last step has cost.
    rates
        What ``"auto"`` takes the cluster to be good for: measured, read or assumed.

    The others are those of `Costs`, so that ``bytes_sent / steps`` is the mean of a step.
    """

    training_steps: int = 0
    void_steps: int = 0
    last: Costs = field(default_factory=Costs)
    rates: str = ""

    def as_dict(self) -> dict[str, float]:
        """Return all numbers, flat and by names that stay the same, for loggers.

        Returns
        -------
        dict
            ``sparcel/steps``, ``sparcel/training_steps`` and ``sparcel/void_steps``. The amounts
            ``messages_sent``, ``bytes_sent``, ``bytes_received``, ``dense_bytes``,
            ``select_seconds`` and ``communicate_seconds``, each in total, as the mean of a step and
            of the last step: ``sparcel/total/bytes_sent``, ``sparcel/mean/bytes_sent``,
            ``sparcel/last/bytes_sent``. The ratios ``compression``, ``density_before`` and
            ``density_after``, each in total and of the last step.
        """
        numbers: dict[str, float] = {
            "steps": self.steps,
            "training_steps": self.training_steps,
            "void_steps": self.void_steps,
        }
        for name in _AMOUNTS:
            numbers[f"total/{name}"] = getattr(self, name)
            numbers[f"mean/{name}"] = getattr(self, name) / max(1, self.steps)
            numbers[f"last/{name}"] = getattr(self.last, name)
        for name in _RATIOS:
            numbers[f"total/{name}"] = getattr(self, name)
            numbers[f"last/{name}"] = getattr(self.last, name)
        return {f"sparcel/{name}": float(number) for name, number in numbers.items()}
