"""Where the ranks of a process group meet in order to connect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from sparcel.comm.engine import Engine
from sparcel.comm.rendezvous import Rendezvous, connecting
from sparcel.comm.torch.gloo import GlooEngine
from sparcel.comm.torch.nccl import NcclEngine
from sparcel.errors import InputError


@dataclass(frozen=True)
class TorchRendezvous(Rendezvous):
    """Where the ranks of a process group meet; errors name them by their default group's ranks.

    Attributes
    ----------
    backend
        ``"gloo"`` or ``"nccl"``.
    device
        The GPU that was current when the user passed the group, or the CPU. The GPU is stored
        because `split` runs on another thread, whose current GPU is the first one.
    """

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
        """See `Rendezvous.engine`."""
        with connecting(self.members[self.rank], self.members):
            if self.backend == "nccl":
                return NcclEngine(self.members, self.rank, self.timeout, self.device)
            store = PrefixStore("gloo", self.store)
            return GlooEngine(store, self.members, self.rank, self.timeout)


def _backend(group: dist.ProcessGroup) -> str:
    """Return the backend to use, one of those that a process group has."""
    backends = dist.get_backend_config(group)
    if "nccl" in backends and torch.cuda.is_available():
        return "nccl"
    if "gloo" in backends:
        return "gloo"
    raise InputError(f"a process group must use Gloo or NCCL, got {backends}")
