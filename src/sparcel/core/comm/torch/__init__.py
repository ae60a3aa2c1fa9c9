"""The communicator over torch.distributed, with the engines Gloo and NCCL."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented
from typing_extensions import override

from sparcel.core.comm.communicator import Communicator, exchanging
from sparcel.core.comm.connected import ConnectedCommunicator, Rendezvous, connecting
from sparcel.core.comm.engine import (
    Arrived,
    Bounds,
    Engine,
    Leaving,
    MeshEngine,
    Rows,
    as_rows,
    reduce_around,
)
from sparcel.core.comm.torch.nccl import NcclEngine
from sparcel.core.kernels import row_bytes
from sparcel.core.ops import Op
from sparcel.errors import InputError


class TorchCommunicator(ConnectedCommunicator):
    """Ranks of a torch.distributed process group.

    The communicator has its own connections, so its messages never mix with those of the group:
    over the mesh, with messages on the CPU, unless it is an `NcclCommunicator`.
    """

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device | None = None) -> TorchCommunicator:
        """Connect the ranks of a process group, all of which call.

        Messages are on the CPU, or on a GPU if the group has NCCL: on ``device``, or on the one
        that is current. If ``device`` is the CPU, they are there although the group has NCCL.
        """
        meeting = TorchRendezvous.of(group, device)
        return (NcclCommunicator if meeting.backend == "nccl" else cls)(meeting)

    @classmethod
    def at(cls, store: Store, rank: int, size: int, timeout: float) -> Self:
        """Connect ranks that share a store and no process group, all of which call.

        Messages are on the CPU.

        Parameters
        ----------
        store
            Under a prefix that nothing else uses.
        timeout
            Seconds that connecting, and an exchange, may take; equal on all ranks.

        Raises
        ------
        CommunicationError
            When some rank does not connect within the timeout.
        """
        host = torch.device("cpu")
        return cls(TorchRendezvous(store, [*range(size)], rank, timeout, "gloo", host))

    @exchanging
    def all_to_all(
        self, message: Tensor, leaving: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        """See `Communicator.all_to_all`; all parts are in one piece of memory."""
        assert isinstance(self.engine, GlooEngine), "TorchRendezvous makes it"
        arrived = self.engine.all_to_all(message, leaving, arriving, self.calls.fingerprint)
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.traffic.count(
            [leaving[rank] for rank in others if leaving[rank]],
            [arriving[rank] for rank in others if arriving[rank]],
        )
        return arrived


class NcclCommunicator(TorchCommunicator):
    """Ranks of a process group with NCCL, with messages on their GPUs."""

    engine: NcclEngine
    all_to_all = Communicator.all_to_all

    @exchanging
    def swap(self, messages: Rows, bounds: Sequence[int], length: Callable[[Tensor], int]) -> Rows:
        """See `Communicator.swap`; rows travel whole, and the host waits for nothing."""
        if self.size == 1:
            return messages
        if not isinstance(messages, Tensor):
            others = {rank: one for rank, one in enumerate(messages) if rank != self.rank}
            messages = as_rows(others, self.size, row_bytes(bounds))
        arrived = self.engine.swap(messages, self.calls.fingerprint)
        self._count(messages[0])
        return arrived

    @exchanging
    def spread(
        self, message: Tensor, bounds: Sequence[int], length: Callable[[Tensor], int]
    ) -> Rows:
        """See `Communicator.spread` and `swap`."""
        rows = as_rows({0: message}, 1, row_bytes(bounds))
        if self.size == 1:
            return rows
        arrived = self.engine.spread(rows[0], self.calls.fingerprint)
        self._count(rows[0])
        return arrived

    @exchanging
    def gather_blocks(self, block: Tensor, nbytes: Sequence[int], control: int = 0) -> Tensor:
        """See `Communicator.gather_blocks`; for payload the host waits for nothing."""
        if control or self.size == 1:
            return super().gather_blocks(block, nbytes, control)
        rows = self.engine.gather(block, max(nbytes), self.calls.fingerprint)
        self._count(rows[0])
        return torch.cat([row[:length] for row, length in zip(rows, nbytes, strict=True)])

    def confirm(self) -> None:
        """See `Communicator.confirm`; blocks that are empty are exchanged for their marks."""
        for grid in self._grids.values():
            grid.node.confirm()
            grid.across.confirm()
        if self.size > 1:
            nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
            self.gather_blocks(nothing, [0] * self.size)

    def _count(self, row: Tensor) -> None:
        """Count a row to each other rank, and one from each."""
        lengths = [row.numel()] * (self.size - 1)
        self.traffic.count(lengths, lengths)


def connect(
    group: dist.ProcessGroup | None, device: torch.device | None = None
) -> TorchCommunicator:
    """Return the communicator of a process group, None being the default one.

    See `sparcel.comm.resolve`. A communicator that failed is returned as well, because a rank
    cannot know which one the others still use. If it is made now and the group has NCCL, messages
    are on ``device``, a GPU, or on the one that is current.
    """
    if group is None:
        if not dist.is_initialized():
            raise InputError(
                "there is no default process group: call torch.distributed.init_process_group "
                "first, or pass group="
            )
        group = dist.group.WORLD
    assert group is not None
    known = _by_group.get(group)
    if known is None or known.closed:
        gpu = None if device is None or device.type == "cpu" else device
        known = _by_group[group] = TorchCommunicator.of(group, gpu)
    return known


_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchCommunicator] = (
    weakref.WeakKeyDictionary()
)


_SOON_SECONDS = 10.0
"""How long ranks may take to connect that have just agreed to."""


@dataclass(frozen=True)
class TorchRendezvous(Rendezvous):
    """Where the ranks of a process group meet; errors name them by their default group's ranks.

    Attributes
    ----------
    backend
        ``"gloo"`` or ``"nccl"``.
    device
        Where messages are: the CPU, or this process's GPU. The GPU is stored because `split` runs
        on another thread, whose current GPU is the first one.
    address
        Where this rank listens, of those that have just agreed to connect; None: where Gloo would.
    """

    backend: str
    device: torch.device
    address: str | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device | None = None) -> Self:
        """Agree with the other ranks of ``group``; all call.

        Rank 0 decides what carries the messages, so ranks that were told different things meet.

        Parameters
        ----------
        device
            Where messages are to be. The CPU: they go over the mesh, for groups with NCCL
            too. Otherwise they go over NCCL if the group has it, from this GPU, or from the one
            that is current now.

        Raises
        ------
        InputError
            When the group's engine is neither Gloo nor NCCL.
        CommunicationError
            When some rank does not come within the group's timeout.
        """
        members, on_host = dist.get_process_group_ranks(group), torch.device("cpu")
        backend, here = _backend(group), on_host
        if backend == "nccl":
            gpu = device if device is not None and device.type == "cuda" else None
            here = gpu or torch.device("cuda", torch.cuda.current_device())
        timeout = group._get_backend(here).options._timeout.total_seconds()
        # Rank 0 chooses a fresh name, since earlier communicators may have left keys in the store.
        chosen = [uuid4().hex, "gloo" if device == on_host else backend]
        with (
            connecting(members[group.rank()], members),
            nullcontext() if here == on_host else torch.cuda.device(here),
        ):
            dist.broadcast_object_list(chosen, group=group, group_src=0)
        name, backend = chosen
        store = PrefixStore(f"sparcel/{name}", group.get_group_store())
        place = here if backend == "nccl" else on_host
        return cls(store, members, group.rank(), timeout, backend, place)

    @override
    def engine(self) -> Engine:
        if self.backend == "nccl":
            store = PrefixStore("idle", self.store)
            return NcclEngine(store, self.members, self.rank, self.timeout, self.device)
        seconds = self.timeout if self.address is None else min(self.timeout, _SOON_SECONDS)
        engine = GlooEngine(self.below("gloo"), self.members, self.rank, seconds, self.address)
        engine.timeout = self.timeout
        return engine


def _backend(group: dist.ProcessGroup) -> str:
    """Return the backend to use, one of those that a process group has."""
    backends = dist.get_backend_config(group)
    if "nccl" in backends and torch.cuda.is_available():
        return "nccl"
    if "gloo" in backends:
        return "gloo"
    raise InputError(
        f"a process group must use Gloo or NCCL, got {backends}; pass"
        " group=torch.distributed.new_group(backend='gloo')"
    )


_LATE, _OTHER_LENGTH, _OTHER_CALL = 2, 3, 4
"""The faults of an exchange but a lost connection, numbered as in `csrc/mesh/mesh.hpp`."""


class GlooEngine(MeshEngine):
    """The engine for Gloo process groups: all messages go over a mesh of sparcel's own.

    Gloo sends three packets and wakes two threads at each end for every point-to-point message,
    which dominates the time of a small exchange. The mesh, a connection to each other rank, sends a
    frame and the bytes of a message, and the thread that waits for the message reads it from the
    socket. Moreover, Gloo listens for as long as a group lives, and each stranger that connects
    costs it a file descriptor; the mesh listens until all ranks are connected.
    """

    carrier = "Gloo"
    waiting = False

    def exchange(self, sends: Leaving, receives: Bounds, call: int, control: int) -> Arrived:
        """See `Engine.exchange`; parts are uint8 and contiguous, and messages arrive whole.

        Raises
        ------
        LostPeerError
            When a connection ends, or the timeout runs out.
        MismatchError
            When a message belongs to another call, or is longer than its bound. Both are checked
            before it is read.
        """
        leaving = [(peer, [*map(to_dlpack, parts)]) for peer, parts in sends.items()]
        self.waiting = True
        try:
            arrived, fault, peer, length = self._mesh.exchange(
                leaving, list(receives.items()), self.timeout, call
            )
        finally:
            self.waiting = False
        if fault:
            raise self._error(fault, peer, length, f"at most {receives.get(peer)}")
        # The extension makes arrays faster than tensors.
        return {peer: [torch.from_numpy(one)] for peer, one in zip(receives, arrived, strict=True)}

    def all_to_all(
        self, message: Tensor, leaving: Sequence[int], arriving: Sequence[int], call: int
    ) -> Tensor:
        """See `Communicator.all_to_all`; raises as `exchange`."""
        out = np.empty(sum(arriving), np.uint8)  # the extension takes arrays faster than tensors
        self._fill(out, message, leaving, arriving, call)
        return torch.from_numpy(out)

    def all_reduce(self, tensor: Tensor, op: Op, call: int) -> None:
        """See `Engine.all_reduce`; around a ring."""

        def swap(to: int, leaving: Tensor, source: int, arriving: Tensor) -> None:
            sent, due = [0] * self.size, [0] * self.size
            sent[to], due[source] = leaving.numel(), arriving.numel()
            self._fill(arriving.numpy(), leaving, sent, due, call)

        reduce_around(tensor, op, self.rank, self.size, swap)

    def _fill(
        self,
        out: np.ndarray[Any, Any],
        message: Tensor,
        leaving: Sequence[int],
        arriving: Sequence[int],
        call: int,
    ) -> None:
        """Do what `all_to_all` does, into memory that is there."""
        self.waiting = True
        try:
            fault, peer, length = self._mesh.all_to_all(
                self.rank, message.numpy(), leaving, out, arriving, self.timeout, call
            )
        finally:
            self.waiting = False
        if fault:
            raise self._error(fault, peer, length, arriving[peer])

    def _error(self, fault: int, peer: int, length: int, expected: int | str) -> Exception:
        if fault == _OTHER_CALL:
            return self._errors.other_call(peer)
        if fault == _OTHER_LENGTH:
            return self._errors.other_length(peer, length, expected)
        return self._errors.late(self.timeout, peer) if fault == _LATE else self._errors.lost(peer)


__all__ = ["TorchCommunicator", "TorchRendezvous", "connect"]
