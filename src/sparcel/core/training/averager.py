"""The averager: named tensors in, updates out, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from os import PathLike

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparcel.core._checks import check_callable, check_type, checked_flag
from sparcel.core.comm import Communicator, Group, Job, carry
from sparcel.core.device import GPUS
from sparcel.core.memory import Range
from sparcel.core.rates import Rates
from sparcel.core.schemes import Scheme
from sparcel.core.side_stream import refuse_capture
from sparcel.core.training.ahead import Ahead, Arrange, in_order
from sparcel.core.training.handle import Handle
from sparcel.core.training.layout import end_to_end
from sparcel.core.training.policy import Policy, Scope, check_vector, stays_dense, treat
from sparcel.core.training.ranks import (
    Carrier,
    Ranks,
    Shard,
    check_carrier,
    check_device,
    connected,
    device_of,
)
from sparcel.core.training.residuals import Residuals
from sparcel.core.training.transaction import Session, Transaction
from sparcel.errors import CommunicationError, InputError, checked_name


class Averager:
    """Averages named tensors over the ranks by a scheme; all ranks make one.

    `average` does a whole step. To exchange tensors as they become ready, `queue` them and end
    the step with `finish`. Statistics, checkpoints, switching and the end are its `handle`'s.

    Parameters
    ----------
    tensors
        The tensors to average, by name, or others of the same shapes, dtypes and device:
        ``dict(model.named_parameters())``.
    scheme
        What averages them, such as ``sparcel.scheme("topk", density=0.01)``. Every vector gets a
        fresh scheme with its settings.
    group
        The ranks: a torch process group, an MPI communicator of mpi4py, a sparcel communicator,
        or None for the default process group. For a process group the averager makes its own
        connections, so that its exchanges never wait for other collectives.
    scaler
        The GradScaler in use, if any, because memory must not change when its scale does.
    policy
        ``(name, tensor) -> bool``: True for a tensor that stays dense.
    densities
        Densities of single tensors, by pattern of their name, the first that fits:
        ``{"conv1.*": 1, "*.embedding.weight": 0.001}``; 1 leaves the tensor dense.
    rows
        Names of the tensors whose gradients are sparse (COO, as embeddings make them). Their rows
        are averaged as they are.
    rates
        What the cluster is good for, which ``"auto"`` chooses by: `Rates`, ``"measure"`` to measure
        them now, in some seconds, or the path of a file from ``sparcel plan --measure --save``.
        None leaves those of ``group``; if it has none, 1 Gbit/s and 100 µs are assumed. Rates that
        are given become those of ``group``. `stats` says what the choices rest on.
    carrier
        What carries tensors on a GPU. ``"host"``: the host, by way of pinned memory, for any group.
        ``"nccl"``: NCCL, which the process group must have, each rank with a GPU of its own. DDP's
        own exchanges stay where they are.
    scope
        Over what one selection is made, with one k: ``"bucket"``, each queued vector, exchanged
        while others are computed; ``"model"``, all vectors of a step, exchanged as one in `finish`.
    frontload
        Whether more is sent in the first steps of a training than the density asks for, unless the
        scheme has a ``warmup``: see `sparcel.schemes.front_loaded`.
    withhold_zeros
        Whether a tensor whose gradient is all zero on this rank is neither sent nor forgotten by
        this rank: for drivers that throw away the updates of unused parameters.
    shard
        Which shard of the tensors this rank holds, if no rank holds all of them. Ranks with the
        same shard average it. ``tensors`` are then shards, and ``group`` holds the ranks of all
        shards.

    Raises
    ------
    InputError
        For densities that fit no tensor, tensors that hold no floats or are on a device that the
        group does not reach, an unknown scope, a carrier that the group or the tensors do not
        allow, nodes with different numbers of ranks, a file without rates, or measuring over NCCL.
    MismatchError
        When the ranks' schemes, settings, policies, densities, rates, carriers, scopes,
        front-loading or tensors differ.

    Warns
    -----
    SparcelWarning
        For densities with a scheme that sends all: they wait for `Handle.switch`.

    Notes
    -----
    A step commits on all vectors or on none. If any tensor of any rank holds NaN or Inf, the step
    is void: the updates of all tensors are NaN on all ranks, and no memory changes. After a
    `CommunicationError` the memory is as it was before the step; make a new averager and load what
    the `Handle.state_dict` of this one returns.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        scheme: Scheme,
        *,
        group: Group = None,
        scaler: torch.amp.GradScaler | None = None,
        policy: Policy = stays_dense,
        densities: Mapping[str, float] | None = None,
        rows: Collection[str] = (),
        rates: Rates | str | PathLike[str] | None = None,
        carrier: Carrier = "host",
        scope: Scope = "bucket",
        frontload: bool = True,
        withhold_zeros: bool = False,
        shard: Shard | None = None,
    ) -> None:
        _check_arguments(tensors, scheme, scaler, policy, densities, rows, rates)
        withhold_zeros = checked_flag(withhold_zeros, "withhold_zeros")
        frontload = checked_flag(frontload, "frontload")
        template = scheme.fresh()
        copied = () if shard is None else shard.copied
        treatment = treat(tensors, template, policy, densities or {}, rows, scope, copied)
        everyone, owned = connected(group, device_of(tensors), carrier)
        try:
            comm = everyone if shard is None else everyone.split(shard.number)
            ranks = Ranks(comm, everyone, shard, owned)
            device = check_device(tensors, comm)
            if rates == "measure" and everyone.size == 1:
                rates = None  # one rank exchanges nothing
            given = "measure" if rates == "measure" else rates is not None
            self._settings = (scaler is not None, given, frontload, carrier)
            ranks.check_alike(template, self._settings, treatment)
            check_carrier(carrier, comm)
            if rates is not None:
                ranks.take_rates(rates)
            ranks.connect_nodes(template)
        except Exception:
            if owned is not None:
                owned.close()
            raise
        residuals = Residuals(
            template, treatment.memory_dtype, layered=bool(treatment.own_densities)
        )
        self._session = Session(
            ranks, device, scaler, frontload, withhold_zeros, treatment, residuals
        )
        self.handle = Handle(self._session)
        """Tells what the steps have cost, saves and loads what is remembered, and ends it all."""

    @property
    def comm(self) -> Communicator:
        """The ranks that average the same tensors."""
        return self._session.ranks.comm

    def average(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Do a step: return the updates of all tensors, by name; all ranks call.

        Parameters
        ----------
        gradients
            A tensor for each name, of the shape and dtype that the averager was made for. Left as
            they were.

        Returns
        -------
        dict
            The average over ranks of what the scheme let through, like ``gradients``. All NaN if
            any gradient of any rank holds NaN or Inf.

        Raises
        ------
        InputError
            When names, shapes or dtypes differ from those that the averager was made for.
        CommunicationError
            On all ranks, when the exchange fails; the memory is as it was before.
        """
        treatment = self._session.treatment
        treatment.check_gradients(gradients)
        if self._session.step is not None:
            raise InputError("tensors are queued already; finish() that step before average()")
        updates: dict[str, Tensor] = {}
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name in treatment.tensors:  # in an order that all ranks share
            if name in treatment.rows:
                self.queue_rows(name, gradients[name].detach())
            else:
                gradient = gradients[name].detach()
                by_dtype.setdefault(gradient.dtype, {})[name] = gradient
        for parts in by_dtype.values():
            vector, places = end_to_end(parts)
            self.queue(vector, places)
            for name, (start, stop) in places.items():
                updates[name] = vector[start:stop].view(parts[name].shape)
        updates |= self.finish()
        return {name: updates[name] for name in gradients}

    def queue(self, vector: Tensor, places: Mapping[str, Range]) -> Job[None]:
        """Queue the exchange of tensors that are ready, and return; all ranks in one order.

        Parameters
        ----------
        vector
            ``[size]``, contiguous, any float dtype: one or several tensors, flat. After `finish`
            it holds their updates; if the step is void, all of it is NaN.
        places
            The elements ``[start, stop)`` of each tensor, by name. A tensor may lie elsewhere in
            each step; its memory follows by name. Elements between the tensors are zero.

        Returns
        -------
        Job
            Its ``wait()`` returns once ``vector`` holds the updates of all but small tensors, which
            `finish` writes. For drivers that need a vector's updates before the step ends, with
            ``policy=lambda *_: False``. On a GPU the updates may then still be under way, and what
            is queued next on the current stream runs after them. Until `finish` has returned, the
            step can still become void, by NaN or Inf in another vector or by an error: the memory
            then still owes these updates, so an update that was applied already has to be undone.
            With ``scope="model"`` the vector holds its gradients until `finish`: ``wait()`` returns
            before there are updates, and leave the vector alone meanwhile.

        Raises
        ------
        InputError
            For a vector that is not flat and contiguous, of floats, and on the tensors' device;
            places that fit no tensor or overlap; or a tensor that this step has already.
        """
        check_vector(vector, places, self._session.device)
        arranged = self._session.treatment.arranged(places, vector.numel())
        return self._open().queue(vector.detach(), arranged)

    def queue_rows(self, name: str, gradient: Tensor) -> None:
        """Queue the exchange of a sparse gradient (COO, one sparse dimension), as `queue` does."""
        self._session.treatment.check_gradient(name, gradient)
        self._open().queue_rows(name, gradient)

    def finish(self, decide: Callable[[bool], bool] | None = None) -> dict[str, Tensor]:
        """Exchange what is left of the step, wait for all updates, and commit; all ranks call.

        Parameters
        ----------
        decide
            Called once all updates are there, with whether they are finite; returns whether the
            step takes effect, the same on all ranks. For drivers whose ranks may leave.

        Returns
        -------
        dict
            The averages of the gradients given to `queue_rows`, by name.

        Raises
        ------
        InputError
            When nothing was queued.
        CommunicationError and others
            What the first failing exchange raised; the memory is as it was before the step.
        """
        session = self._session
        step, session.step = session.step, None
        if step is None:
            raise InputError("the step has no tensors; call queue() before finish()")
        step.end()
        agreed = decide is None or decide(step.finite)
        if step.finite and agreed:
            step.commit()
        session.count(step.costs, step.finite and agreed)
        return step.rows

    def connect(self, comm: Communicator, steps: int) -> None:
        """Exchange with other ranks from the next step on; all of these call, between two steps.

        What memory holds stays. For drivers whose ranks come and go, without shards.

        Parameters
        ----------
        comm
            The ranks, this one among them. The former communicator stays open.
        steps
            How many steps they have done.

        Raises
        ------
        MismatchError
            When the ranks average something else.
        """
        session = self._session
        session.step = None
        ranks = Ranks(carry(comm, session.device), carry(comm, session.device), None, None)
        ranks.check_alike(self.handle.scheme, self._settings, session.treatment)
        ranks.connect_nodes(self.handle.scheme)
        session.ranks = ranks
        session.residuals.lay_out_anew(steps)

    def decay(self, names: Iterable[str], factor: float) -> None:
        """Multiply what this rank keeps back of some tensors; what that takes off is lost."""
        for name in names:
            memory = self._session.residuals.of(name).get("memory")
            if memory is not None:
                memory.mul_(factor)

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
        session = self._session
        if session.ahead is not None:
            raise InputError("the parameters of this exchange are moved ahead already")
        for name in parameters:
            checked_name(name, session.treatment.tensors, "the name of a tensor to move ahead")
        session.ahead = ahead = Ahead(parameters, session.residuals, arrange)
        if optimizer is not None:
            ahead.follow(optimizer)
        return ahead

    def on_close(self, undo: Callable[[], None]) -> None:
        """Let `Handle.close` undo what a driver has done to the user's objects."""
        self._session.undo.callback(undo)

    def _open(self) -> Transaction:
        """Return the step that is being queued."""
        session = self._session
        if session.closed:
            raise CommunicationError("the averager was closed; make a new one to exchange more")
        if session.device.type in GPUS:
            refuse_capture(session.device)
        if session.step is None:
            session.step = Transaction(session)
        return session.step


def _check_arguments(
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    scaler: torch.amp.GradScaler | None,
    policy: Policy,
    densities: Mapping[str, float] | None,
    rows: Collection[str],
    rates: Rates | str | PathLike[str] | None,
) -> None:
    """Raise an `InputError` that names the argument of an averager that is of a wrong type."""
    check_type(tensors, Mapping, "tensors", "such as dict(model.named_parameters())")
    for name, tensor in tensors.items():
        check_type(tensor, Tensor, f"tensors[{name!r}]")
    check_type(scheme, Scheme, "scheme", "sparcel.scheme('topk') makes one")
    if scaler is not None:
        check_type(scaler, torch.amp.GradScaler, "scaler")
    check_callable(policy, "policy")
    if densities is not None:
        check_type(densities, Mapping, "densities")
    if isinstance(rows, str) or not isinstance(rows, Collection):
        raise InputError(f"rows must be a list of names, got {rows!r}")
    if not (rates is None or isinstance(rates, Rates | str | PathLike)):
        raise InputError(f'rates must be Rates, "measure" or the path of a file, got {rates!r}')
