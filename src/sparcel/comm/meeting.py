"""How the ranks of a process group come to connections of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from sparcel.comm.engine import Engine
from sparcel.comm.gloo import GlooEngine
from sparcel.comm.nccl import NcclEngine
from sparcel.errors import InputError


@dataclass(frozen=True)
class Meeting:
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
    """

    store: Store
    members: list[int]
    rank: int
    timeout: float
    backend: str

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """Agree with the other ranks of ``group``; all call."""
        # A name of its own, from rank 0: the store may hold what communicators before left there.
        name = [uuid4().hex]
        dist.broadcast_object_list(name, group=group, group_src=0)
        backend = _backend(group)
        engine = group._get_backend(torch.device("cuda" if backend == "nccl" else "cpu"))
        return cls(
            PrefixStore(f"sparcel/{name[0]}", group.get_group_store()),
            dist.get_process_group_ranks(group),
            group.rank(),
            engine.options._timeout.total_seconds(),
            backend,
        )

    @property
    def name(self) -> int:
        """What the other ranks call this process."""
        return self.members[self.rank]

    def engine(self) -> Engine:
        """Connect to the other ranks."""
        if self.backend == "nccl":
            return NcclEngine(self.members, self.rank, self.timeout)
        store = PrefixStore("gloo", self.store)
        return GlooEngine(store, self.members, self.rank, self.timeout)


def _backend(group: dist.ProcessGroup) -> str:
    """Return the engine to use of those that a process group has."""
    backends = dist.get_backend_config(group)
    if "nccl" in backends and torch.cuda.is_available():
        return "nccl"
    if "gloo" in backends:
        return "gloo"
    raise InputError(f"a process group must use Gloo or NCCL, got {backends}")
