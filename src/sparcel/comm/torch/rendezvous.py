"""Where the ranks of a process group meet in order to connect."""

from __future__ import annotations

from contextlib import nullcontext
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

    def engine(self) -> Engine:
        """See `Rendezvous.engine`."""
        with connecting(self.members[self.rank], self.members):
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
