"""Messages over NCCL, which wants to know on both sides how long each is.

No machine with two GPUs was at hand when this was written: it follows torch's documentation and
has not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.comm.engine import LostPeerError, too_long
from sparcel.ops import Op


class NcclEngine:
    """A process group of NCCL's, used by one communicator alone.

    Parameters
    ----------
    members
        The process of each rank, as torch.distributed numbers them.
    rank
        This process's rank.
    timeout
        Seconds until NCCL's watchdog gives up on a transfer.
    device
        This process's GPU.
    """

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
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Engine.exchange`. The host waits for the sizes, and for nothing else."""
        peers = list(dict.fromkeys([*sends, *receives]))
        joined = {peer: torch.cat(list(parts)) for peer, parts in sends.items()}
        sizes = [joined[peer].numel() if peer in joined else 0 for peer in peers]
        leaving = torch.tensor(sizes, device=self.device)
        arriving = torch.empty_like(leaving)
        self._transfer(peers, list(leaving.split(1)), list(arriving.split(1)))
        sizes = arriving.tolist()
        for peer, nbytes in zip(peers, sizes, strict=True):
            at_most = receives.get(peer, 0)
            if nbytes > at_most:
                raise too_long(self.names[peer], nbytes, self.names[self.rank], at_most)
        # NCCL hangs on a pair of ranks of which one only sends: what is empty is sent as a byte.
        nothing = torch.zeros(1, dtype=torch.uint8, device=self.device)
        messages = [
            joined[peer] if joined.get(peer, nothing[:0]).numel() else nothing for peer in peers
        ]
        buffers = [nothing.new_empty(max(nbytes, 1)) for nbytes in sizes]
        self._transfer(peers, messages, buffers)
        came = dict(zip(peers, zip(buffers, sizes, strict=True), strict=True))
        return {peer: came[peer][0][: came[peer][1]] for peer in receives}

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`."""
        reduce_op = getattr(dist.ReduceOp, (op.name or "").upper())
        self._checked(lambda: dist.all_reduce(tensor, reduce_op, group=self._group))

    def probe(self) -> None:
        """Leave it to NCCL's watchdog."""

    def abort(self) -> None:
        """Break off what is under way."""
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
