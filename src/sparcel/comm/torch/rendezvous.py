"""Where the ranks of a process group meet in order to connect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from sparcel.comm.engine import Engine
from sparcel.comm.failure import StoreFailure
from sparcel.comm.rendezvous import connecting
from sparcel.comm.torch.gloo import GlooEngine
from sparcel.comm.torch.nccl import NcclEngine
from sparcel.errors import InputError


@dataclass(frozen=True)
class TorchRendezvous:
    """Where the ranks of one communicator meet; all fields but ``rank`` are equal on all ranks.

    Attributes
    ----------
    store
        A store under a prefix that no other communicator uses.
    members
        The rank of each process in the default group; errors name ranks by these numbers.
    rank
        Index of this process in ``members``.
    timeout
        Seconds after which a hanging exchange raises.
    backend
        ``"gloo"`` or ``"nccl"``.
    device
        The GPU that was current when the user passed the group, or the CPU. The GPU is stored
        because `split` runs on another thread, whose current GPU is the first one.
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
            When some rank does not come within the group's timeout.
        """
        members = dist.get_process_group_ranks(group)
        # Rank 0 chooses a fresh name, since earlier communicators may have left keys in the store.
        name = [uuid4().hex]
        with connecting(members[group.rank()], members):
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
            When some rank does not connect within the timeout.
        """
        with connecting(self.members[self.rank], self.members):
            if self.backend == "nccl":
                return NcclEngine(self.members, self.rank, self.timeout, self.device)
            store = PrefixStore("gloo", self.store)
            return GlooEngine(store, self.members, self.rank, self.timeout)

    def failure(self) -> StoreFailure:
        """See `Rendezvous.failure`."""
        return StoreFailure(self.store, len(self.members))

    def subgroup(self, ranks: list[int], label: str) -> Self:
        """See `Rendezvous.subgroup`."""
        return replace(
            self,
            store=PrefixStore(label, self.store),
            members=[self.members[rank] for rank in ranks],
            rank=ranks.index(self.rank),
        )


def _backend(group: dist.ProcessGroup) -> str:
    """Return the backend to use, one of those that a process group has."""
    backends = dist.get_backend_config(group)
    if "nccl" in backends and torch.cuda.is_available():
        return "nccl"
    if "gloo" in backends:
        return "gloo"
    raise InputError(f"a process group must use Gloo or NCCL, got {backends}")
