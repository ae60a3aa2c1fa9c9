"""One step as a transaction: the exchanges that it has queued, and their common end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.auto import all_reduce, sum_whole
from sparcel.core.comm import Call, Job, ring_bytes
from sparcel.core.device import GPUS, Checks, adding_to, finite_flag, read
from sparcel.core.memory import wide_dtype
from sparcel.core.profiling import profiled
from sparcel.core.schemes import Costs, Outcome, Request, Scheme, named
from sparcel.core.side_stream import used_here
from sparcel.core.stream import SparseStream
from sparcel.core.training.ahead import Ahead
from sparcel.core.training.layout import Arrangement, copy_pieces, joined, zeros_in
from sparcel.core.training.policy import Treatment
from sparcel.core.training.ranks import Ranks
from sparcel.core.training.residuals import Residuals
from sparcel.core.wire import Wire
from sparcel.errors import InputError


@dataclass(eq=False)
class Session:
    """The exchange of a training's gradients, from its first step to its end.

    Attributes
    ----------
    ranks, device
        Who exchanges them, and where they are.
    scaler, frontload, withhold_zeros
        As for `sparcel.training.Averager`.
    treatment, residuals
        How each tensor is exchanged, which a switch of the scheme changes, and what is kept back.
    step
        The step that is being queued, if one is.
    total, last, void_steps
        What all steps have cost, what the last one has, and how many had no effect.
    taken
        The magnitude that the last effective step took out of memory.
    ahead
        What tells where the memory would bring the parameters, if a driver has asked for it.
    closed
        Whether nothing can be exchanged any more.
    undo
        Callbacks that undo, at the end, what a driver has done to the user's objects.
    """

    ranks: Ranks
    device: torch.device
    scaler: torch.amp.GradScaler | None
    frontload: bool
    withhold_zeros: bool
    treatment: Treatment
    residuals: Residuals
    step: Transaction | None = None
    total: Costs = field(default_factory=Costs)
    last: Costs = field(default_factory=Costs)
    void_steps: int = 0
    taken: float = 0.0
    ahead: Ahead | None = None
    closed: bool = False
    undo: ExitStack = field(default_factory=ExitStack)

    def count(self, step: Costs, effective: bool) -> None:
        """Add what a step has cost that ended."""
        self.total, self.last = self.total + step, step
        if effective:
            self.taken = float(step.magnitude)
        else:
            self.void_steps += 1

    def close(self) -> None:
        """Exchange nothing more, and undo what the driver has done."""
        self.closed = True
        try:
            self.undo.close()
        finally:
            self.ranks.close()


class Transaction:
    """What one step has queued so far.

    Each vector is exchanged in a job of its own, in the order of queueing, or all that were held in
    one job. The last job exchanges the small tensors of all vectors together. If any tensor of any
    rank was not finite, it then replaces all updates by NaN: no vector will commit, so none of the
    updates may be applied.

    Attributes
    ----------
    finite
        Whether the tensors of all ranks were finite; known once the step has ended.
    rows
        The averages of sparse gradients, by name.
    costs
        What the step has cost; complete once it has ended.
    """

    def __init__(self, session: Session) -> None:
        self.finite, self.costs = False, Costs(steps=1)
        self.rows: dict[str, Tensor] = {}
        self._session, self._comm = session, session.ranks.comm
        self._names: set[str] = set()
        self._jobs: list[Job[None]] = []
        self._updates: list[Tensor] = []
        """The flat tensors that were queued, which hold the updates at the end."""
        self._held: list[tuple[Tensor, Arrangement]] = []
        """The vectors of which one selection will be made, when the step ends."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Ranges of queued vectors, each with the tensor that gets its updates."""
        self._small: list[tuple[tuple[str, ...], list[Tensor], Tensor]] = []
        """Of vectors with small tensors: the names, the places of these, and their gradients."""
        self._schemes: list[Scheme] = []
        self._outcomes: list[Outcome] = []
        """What the vectors' schemes have begun, and have to commit, each with its outcome."""
        self._flags: list[bool | Tensor] = []
        """Whether other tensors are finite."""
        self._checks: Checks = []
        """What the host asks a GPU when it looks at it, at the step's end."""
        self._left: dict[str, Tensor] = {}
        """What tensors still owe of an old memory when the step has added a share to gradients."""
        self._will_owe = False
        """Whether some rank may owe something of an old memory after this step."""
        self._traffic_before = replace(self._comm.traffic)

    def queue(self, vector: Tensor, arranged: Arrangement) -> Job[None]:
        """Exchange a vector in its turn, or hold it if one selection is made over all vectors."""
        self._include(arranged.names)
        self._updates.append(vector)
        return self._submit(partial(self._take, vector, arranged))

    def queue_rows(self, name: str, gradient: Tensor) -> None:
        """Average a sparse gradient (COO) over the ranks in its turn; nothing is left out.

        Repeated rows are added up before they are sent. Half precisions are sent as float32, so
        that sums are as exact as those of the memory.
        """
        self._include((name,))
        self._submit(partial(self._exchange_rows, name, gradient))

    def _include(self, names: Iterable[str]) -> None:
        """Add tensors to the step, or raise `InputError`: what is there would commit twice."""
        if twice := sorted(self._names.intersection(names)):
            raise InputError(f"tensors {twice} are queued already in this step; finish() it first")
        self._names.update(names)

    def end(self) -> None:
        """Exchange the small tensors, and wait until all updates are in place.

        Raises what the first failing job raised. On a GPU, what the caller queues next on its
        current stream runs after the updates.
        """
        if self._session.treatment.scope == "model":
            self._submit(self._exchange_held)
        self._submit(self._finish)
        with profiled("wait"):
            for job in self._jobs:
                job.wait()
        if self._comm.device.type in GPUS:
            used_here(*self.rows.values(), *self._left.values())  # jobs made them on another stream
        now, before, costs = self._comm.traffic, self._traffic_before, self.costs
        costs.messages_sent = now.messages_sent - before.messages_sent
        costs.bytes_sent = now.bytes_sent - before.bytes_sent
        costs.bytes_received = now.bytes_received - before.bytes_received

    def commit(self) -> None:
        """Let the step take effect; it has ended, and was finite on all ranks."""
        for scheme, outcome in zip(self._schemes, self._outcomes, strict=True):
            scheme.commit(outcome)
        flushed = self._session.residuals.commit(self._left, self._will_owe)
        self.costs.count_flushed(flushed)
        if self._comm.device.type in GPUS:
            # Jobs made the memory on their stream, and this thread reads it on its own.
            for scheme in self._schemes:
                used_here(*scheme.coordinates().values())

    def _submit(self, job: Callable[[], None]) -> Job[None]:
        """Run ``job`` after all jobs queued before."""
        if self._comm.device.type in GPUS:
            job = partial(self._run_unchecked, job)
        self._jobs.append(self._comm.submit(job))
        return self._jobs[-1]

    def _run_unchecked(self, job: Callable[[], None]) -> None:
        """Run a job whose checks wait until the host looks at the device, at the step's end."""
        with adding_to(self._checks):
            job()

    def _take(self, vector: Tensor, arranged: Arrangement) -> None:
        self.costs.dense_bytes += ring_bytes(vector.nbytes, self._comm.size)
        if self._session.treatment.scope == "model" and arranged.large:
            self._held.append((vector, arranged))
        else:
            self._exchange(vector, arranged)

    def _exchange_held(self) -> None:
        """Exchange the vectors that were held as one."""
        if self._held:
            # Memory stays in one dtype, also in steps without the tensors that are float64.
            treatment = self._session.treatment
            doubled = treatment.selects and treatment.memory_dtype == torch.float64
            vector, arranged, self._copies = joined(self._held, doubled)
            self._exchange(vector, arranged)

    def _exchange(self, vector: Tensor, arranged: Arrangement) -> None:
        """Replace the tensors in a vector by their updates, except for small ones if those wait."""
        session = self._session
        places = [vector[start:stop] for start, stop in arranged.apart]
        gradients = torch.cat(places) if places else None
        sent_whole, large, flush = False, arranged.large, session.residuals.flush
        for served, flat in session.residuals.vectors(large, vector) if large else ():
            moved = flat is not vector
            withheld = zeros_in(flat, served.pieces) if session.withhold_zeros else ()
            request = Request(
                served.layers,
                withheld,
                () if moved else arranged.apart,  # one in another layout has no small tensors
                scale=self._scale,
                front_loaded=session.frontload,
                tensors=arranged.names,
                costs=self.costs,
            )
            if flush.owed:
                # Under a scheme without memory, a share of what an old memory owes goes along.
                self._left |= flush.add_to(flat, served.pieces, withheld, request.scale)
            outcome = served.scheme.begin(flat, self._comm, request, in_place=True)
            self._schemes.append(served.scheme)
            self._outcomes.append(outcome)
            if moved:
                copy_pieces(flat, served.pieces, vector, large)
            sent_whole = outcome.sent_whole and not moved
        if gradients is not None and not sent_whole:
            self._small.append((arranged.names, places, gradients))

    @cached_property
    def _scale(self) -> float:
        """What a GradScaler has multiplied gradients by; 1 if it does not matter.

        Asked in the first exchange and not while computing, which would have to wait for a GPU to
        answer. NaN if backing off has made it so small that float32 does not hold its quotients.
        """
        session, scaler = self._session, self._session.scaler
        owes = session.treatment.selects or session.residuals.flush.owed
        if scaler is None or not (scaler.is_enabled() and owes):
            return 1.0
        # The public function would wait for a GPU beside `read`.
        held = scaler._get_scale_async()
        scale = scaler.get_scale() if held is None else float(read(held))
        return scale if scale > self._comm.size * torch.finfo(torch.float32).tiny else math.nan

    def _exchange_rows(self, name: str, gradient: Tensor) -> None:
        dtype, shape = gradient.dtype, gradient.shape
        dense_bytes = shape.numel() * dtype.itemsize
        gradient = gradient.to(wide_dtype(dtype)).coalesce()
        rows = gradient.values()
        rows = rows.reshape(len(rows), shape[1:].numel())
        stream = SparseStream(gradient.indices()[0], rows, shape[0])
        stream.finite = finite_flag(rows)
        reduce = partial(all_reduce, stream, Wire(self._comm))
        with self.costs.communicating():
            total = self._comm.call(_exchange_of(((name,),)), reduce)
        average = self._average(total)
        self.costs.dense_bytes += ring_bytes(dense_bytes, self._comm.size)
        self.costs.coordinates += shape.numel()
        self.costs.asked += rows.numel()
        self.costs.selected += rows.numel()
        self.costs.reduced += total.values.numel()
        indices = total.indices
        if indices is None:
            indices = torch.arange(shape[0], device=rows.device)
        average = average.reshape(total.nnz, *shape[1:]).to(dtype)
        if dtype != total.dtype:
            # An average that fits the sum's dtype may overflow a narrower one.
            self._flags.append(finite_flag(average))
        self.rows[name] = _coalesced(indices, average, shape)

    def _finish(self) -> None:
        if self._small:
            several = tuple(names for names, *_ in self._small)
            self._comm.call(_exchange_of(several), self._exchange_small)
        self._comm.confirm()  # what ranks that queued others would mix up must not commit
        if self._copies:
            places, updates = zip(*self._copies, strict=True)
            torch._foreach_copy_(places, updates)
        for place, update in self._copies:
            if place.dtype != update.dtype:
                # A sum that fits the widest dtype may overflow a narrower one.
                self._flags.append(finite_flag(place))
        session = self._session
        self._outcomes, finite = self.costs.settle(self._outcomes, self._flags)
        if session.ranks.shard is not None:
            # The ranks that average the same shard know it of one another; others do not.
            finite = all(session.ranks.gather("agree", int(finite), step=session.residuals.steps))
        self.finite, flush = finite, session.residuals.flush
        if not finite:
            self._void()
        elif flush.pending:
            self._will_owe = flush.will_owe(self._left, session.ranks)

    def _void(self) -> None:
        """Make all updates NaN."""
        for update in self._updates:
            update.fill_(math.nan)
        self.rows = {name: _poisoned(average) for name, average in self.rows.items()}

    def _exchange_small(self) -> None:
        _, places, gradients = zip(*self._small, strict=True)
        doubles = torch.float64 in [gradient.dtype for gradient in gradients]
        wide = torch.float64 if doubles else torch.float32
        vector = torch.cat([gradient.to(wide) for gradient in gradients])
        with self.costs.communicating():
            total = sum_whole(vector, self._comm)
        self.costs.count_whole(vector.numel())
        updates = [place for several in places for place in several]
        parts = self._average(total).split([update.numel() for update in updates])
        torch._foreach_copy_(updates, parts)

    def _average(self, total: SparseStream) -> Tensor:
        """Return the averages over ranks, given their sums, and note whether all are finite."""
        average = kernels.average(total.values, self._comm.size)
        self._flags += [total.finite, finite_flag(average)]
        return average


@lru_cache(maxsize=1024)
def _exchange_of(several: tuple[tuple[str, ...], ...]) -> Call:
    """Describe the exchange of tensors of these vectors.

    Ranks that have queued other tensors, because their passes used other parts of a model, would
    mix them up if their sizes are the same.
    """
    return Call.of("exchange", named(tuple(name for names in several for name in names)))


def _poisoned(rows: Tensor) -> Tensor:
    """Return a sparse gradient of NaN with the same rows, or with the first if there are none."""
    indices, values = rows.indices(), rows.values()
    if not indices.numel() and rows.shape[0]:
        indices, values = indices.new_zeros(1, 1), values.new_zeros(1, *rows.shape[1:])
    return _coalesced(indices[0], torch.full_like(values, math.nan), rows.shape)


def _coalesced(indices: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Return the sparse tensor that holds ``rows`` at sorted, unique ``indices``.

    Up to torch 2.12, `torch.sparse_coo_tensor` warns that it checks nothing even if it is told to
    check nothing. The operation that it calls does not warn.
    """
    found: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        rows.ndim - 1,
        shape,
        indices.long()[None],
        rows,
        dtype=rows.dtype,
        layout=torch.sparse_coo,
        device=rows.device,
        is_coalesced=True,
    )
    return found
