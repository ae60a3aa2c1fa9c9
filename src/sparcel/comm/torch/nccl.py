"""The engine for NCCL process groups; both sides of an NCCL transfer must know its length.

This code follows torch's documentation and has not been run, because no machine with two GPUs was
available.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.comm.engine import LostPeerError, other_call, too_long
from sparcel.ops import Op


class NcclEngine:
    """An NCCL process group for one communicator.

    Parameters
    ----------
    members
        The rank of each process in the default group.
    rank
        This process's rank.
    timeout
        Seconds after which NCCL's watchdog aborts a transfer.
    device
        This process's GPU.
    """

    carrier = "NCCL"

    def __init__(self, members: list[int], rank: int, timeout: float, device: torch.device) -> None:
        self.names, self.rank, self.waiting = members, rank, False
        self.device = device
        self._group = dist.new_group(
            members,
            timeout=timedelta(seconds=timeout),
            backend="nccl",
            use_local_synchronization=True,
            device_id=self.device,
        )

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int], call: int
    ) -> dict[int, Tensor]:
        """See `Engine.exchange`; the host waits for the sizes and the calls only."""
        peers = list(dict.fromkeys([*sends, *receives]))
        joined = {peer: torch.cat(list(parts)) for peer, parts in sends.items()}
        sizes = [joined[peer].numel() if peer in joined else 0 for peer in peers]
        leaving = torch.tensor([[size, call] for size in sizes], device=self.device)
        arriving = torch.empty_like(leaving)
        self._transfer(peers, list(leaving.unbind()), list(arriving.unbind()))
        sizes = []
        for peer, (nbytes, theirs) in zip(peers, arriving.tolist(), strict=True):
            if theirs != call:
                raise other_call(self.names[peer], self.names[self.rank])
            sizes.append(nbytes)
            at_most = receives.get(peer, 0)
            if nbytes > at_most:
                raise too_long(self.names[peer], nbytes, self.names[self.rank], at_most)
        # NCCL hangs if one rank of a pair only sends, so an empty message is sent as one byte.
        padding = torch.zeros(1, dtype=torch.uint8, device=self.device)
        messages = [
            joined[peer] if joined.get(peer, padding[:0]).numel() else padding for peer in peers
        ]
        buffers = [padding.new_empty(max(nbytes, 1)) for nbytes in sizes]
        self._transfer(peers, messages, buffers)
        arrived = dict(zip(peers, zip(buffers, sizes, strict=True), strict=True))
        return {peer: arrived[peer][0][: arrived[peer][1]] for peer in receives}

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`."""
        reduce_op = getattr(dist.ReduceOp, (op.name or "").upper())
        self._checked(lambda: dist.all_reduce(tensor, reduce_op, group=self._group))

    def probe(self) -> None:
        """Do nothing: NCCL's watchdog detects broken connections."""

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._group.abort()

    def _transfer(self, peers: list[int], leaving: list[Tensor], arriving: list[Tensor]) -> None:
        ops = []
        for peer, message, buffer in zip(peers, leaving, arriving, strict=True):
            ops.append(dist.P2POp(dist.isend, message, group=self._group, group_peer=peer))
            ops.append(dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=peer))

        def transfer() -> None:
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()

        self._checked(transfer)

    def _checked(self, call: Callable[[], object]) -> None:
        try:
            call()
        except dist.DistBackendError as error:
            raise LostPeerError(
                f"rank {self.names[self.rank]} lost a peer: {error}", False
            ) from error
