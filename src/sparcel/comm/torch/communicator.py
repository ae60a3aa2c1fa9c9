"""The communicator over torch.distributed process groups."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from sparcel.comm.communicator import exchanging
from sparcel.comm.connected import ConnectedCommunicator
from sparcel.comm.torch.gloo import GlooEngine
from sparcel.comm.torch.rendezvous import TorchRendezvous
from sparcel.errors import InputError


class TorchCommunicator(ConnectedCommunicator):
    """Ranks of a torch.distributed process group.

    The communicator has its own connections, so its messages never mix with those of the group.
    """

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device | None = None) -> Self:
        """Connect the ranks of a process group, all of which call.

        Messages are on the CPU, or on a GPU if the group has NCCL: on ``device``, or on the one
        that is current. If ``device`` is the CPU, they are there although the group has NCCL.
        """
        return cls(TorchRendezvous.of(group, device))

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
        """See `Communicator.all_to_all`; over the mesh, all parts are in one piece of memory."""
        engine = self.engine
        if not isinstance(engine, GlooEngine):
            return super().all_to_all(message, leaving, arriving)
        arrived = engine.all_to_all(message, leaving, arriving, self.calls.fingerprint)
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.traffic.count(
            [leaving[rank] for rank in others if leaving[rank]],
            [arriving[rank] for rank in others if arriving[rank]],
        )
        return arrived


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
