"""How the ranks of a process group come to connections of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from sparcel.comm.engine import Engine, expecting
from sparcel.comm.fate import StoreFate
from sparcel.comm.gloo import GlooEngine
from sparcel.comm.nccl import NcclEngine
from sparcel.errors import InputError


@dataclass(frozen=True)
class TorchMeeting:
    """Where the ranks of a communicator meet, the same for all but ``rank``.

    Attributes
    ----------
    store
        A store under a prefix that no other communicator has.
    members
        The process of each rank, as torch.distributed numbers them; errors name these.
    rank
        Index of this process in ``members``.
    timeout
        Seconds after which an exchange that hangs raises.
    backend
        ``"gloo"`` or ``"nccl"``.
    device
        The GPU that was current where the group was taken over, or the CPU. Parts are split off on
        another thread, which begins on the first GPU.
    """

    store: Store
    members: list[int]
    rank: int
    timeout: float
    backend: str
    device: torch.device

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """Agree with the other ranks of ``group``; all call.

        Raises
        ------
        InputError
            When the group's engine is neither Gloo nor NCCL.
        CommunicationError
            When not all ranks came within the group's timeout.
        """
        members = dist.get_process_group_ranks(group)
        # A name of its own, from rank 0: the store may hold what communicators before left there.
        name = [uuid4().hex]
        with expecting(members[group.rank()], members):
            dist.broadcast_object_list(name, group=group, group_src=0)
        backend = _backend(group)
        device = torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        engine = group._get_backend(device)
        return cls(
            PrefixStore(f"sparcel/{name[0]}", group.get_group_store()),
            members,
            group.rank(),
            engine.options._timeout.total_seconds(),
            backend,
            device,
        )

    def engine(self) -> Engine:
        """Connect to the other ranks.

        Raises
        ------
        CommunicationError
            When not all ranks came within the timeout.
        """
        with expecting(self.members[self.rank], self.members):
            if self.backend == "nccl":
                return NcclEngine(self.members, self.rank, self.timeout, self.device)
            store = PrefixStore("gloo", self.store)
            return GlooEngine(store, self.members, self.rank, self.timeout)

    def fate(self) -> StoreFate:
        """Return the end that the ranks share."""
        return StoreFate(self.store, len(self.members))

    def part(self, ranks: list[int], label: str) -> Self:
        """Return where these ranks meet."""
        return replace(
            self,
            store=PrefixStore(label, self.store),
            members=[self.members[rank] for rank in ranks],
            rank=ranks.index(self.rank),
        )


def _backend(group: dist.ProcessGroup) -> str:
    """Return the engine to use of those that a process group has."""
    backends = dist.get_backend_config(group)
    if "nccl" in backends and torch.cuda.is_available():
        return "nccl"
    if "gloo" in backends:
        return "gloo"
    raise InputError(f"a process group must use Gloo or NCCL, got {backends}")
