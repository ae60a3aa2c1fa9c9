"""The engine for NCCL process groups; both sides of an NCCL transfer must know its length.

This code follows torch's documentation. `tests/comm/torch/test_nccl.py` runs it over Gloo's process
groups; it has not been run over NCCL's, because no machine with two GPUs was available.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.comm.engine import ALL_CONTROL, Arrived, Bounds, Leaving, LostPeerError, PeerErrors
from sparcel.device import put, read
from sparcel.ops import Op

_FRAME_BYTES = 4096
"""The bytes of a frame: the length and the call of a message, and the control that fits."""

_HEAD_BYTES = 16


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
    _aborted = False

    def __init__(self, members: list[int], rank: int, timeout: float, device: torch.device) -> None:
        self._errors, self.waiting = PeerErrors(members, rank), False
        self.device = device
        self._group = dist.new_group(
            members,
            timeout=timedelta(seconds=timeout),
            backend="nccl",
            use_local_synchronization=True,
            device_id=self.device,
        )

    def exchange(self, sends: Leaving, receives: Bounds, call: int, control: int) -> Arrived:
        """See `Engine.exchange`; messages arrive as control, payload, or both in this order.

        The host waits for the frames, which travel first and hold the control that fits into them.
        What is left follows in a second transfer, and the host reads nothing of a payload.
        """
        peers = list(dict.fromkeys([*sends, *receives]))
        framed = min(control, _FRAME_BYTES - _HEAD_BYTES)
        leaving = [self._divided(sends.get(peer, ()), control, framed) for peer in peers]
        frames = self._exchange_frames(peers, leaving, call)
        heads = frames[:, :_HEAD_BYTES].contiguous().view(torch.int64).tolist()
        for peer, (nbytes, theirs) in zip(peers, heads, strict=True):
            if theirs != call:
                raise self._errors.other_call(peer)
            if nbytes > (at_most := receives.get(peer, 0)):
                raise self._errors.other_length(peer, nbytes, f"at most {at_most}")
        begun = [
            frame[_HEAD_BYTES : _HEAD_BYTES + min(nbytes, framed)]
            for frame, (nbytes, _) in zip(frames, heads, strict=True)
        ]
        lengths = [nbytes - held.numel() for held, (nbytes, _) in zip(begun, heads, strict=True)]
        rests = self._exchange_rests(peers, [rest for _, rest in leaving], lengths)
        arrived = {
            peer: _parted(held, rest, control)
            for peer, held, rest in zip(peers, begun, rests, strict=True)
        }
        return {peer: arrived[peer] for peer in receives}

    def all_reduce(self, tensor: Tensor, op: Op, call: int) -> None:
        """See `Engine.all_reduce`."""
        reduce_op = getattr(dist.ReduceOp, (op.name or "").upper())
        self._checked(lambda: dist.all_reduce(tensor, reduce_op, group=self._group))

    def probe(self) -> None:
        """Do nothing: NCCL's watchdog detects broken connections."""

    def lost(self) -> list[int]:
        """See `Engine.lost`."""
        return []

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._aborted = True
        self._group.abort()

    def _divided(self, parts: Sequence[Tensor], control: int, framed: int) -> tuple[Tensor, Tensor]:
        """Return the up to ``framed`` bytes of a message that its frame holds, and the rest."""
        ends = list(accumulate(part.numel() for part in parts))
        count = bisect_left(ends, control) + 1 if control else 0
        begun, rest = self._on_device(parts[:count]), self._on_device(parts[count:])
        if begun.numel() > framed:
            begun, rest = begun[:framed], torch.cat([begun[framed:], rest])
        return begun, rest

    def _on_device(self, parts: Sequence[Tensor]) -> Tensor:
        """Join parts, which may be on the host."""
        moved = [put(part, self.device, torch.uint8) if part.is_cpu else part for part in parts]
        if len(moved) == 1:
            return moved[0]
        return torch.cat([torch.empty(0, dtype=torch.uint8, device=self.device), *moved])

    def _exchange_frames(
        self, peers: list[int], messages: list[tuple[Tensor, Tensor]], call: int
    ) -> Tensor:
        """Exchange frames, given what of messages they hold and the rest; return the peers'.

        These are on the host. Frames have one length whatever they hold, so ranks in different
        calls can exchange them.
        """
        heads = [[begun.numel() + rest.numel(), call] for begun, rest in messages]
        leaving = torch.zeros(len(peers), _FRAME_BYTES, dtype=torch.uint8, device="cpu")
        numbers = torch.tensor(heads, dtype=torch.int64, device="cpu").view(len(peers), 2)
        leaving[:, :_HEAD_BYTES] = numbers.view(torch.uint8)
        leaving = put(leaving, self.device, torch.uint8)
        for frame, (begun, _) in zip(leaving, messages, strict=True):
            frame[_HEAD_BYTES : _HEAD_BYTES + begun.numel()] = begun
        arriving = torch.empty_like(leaving)
        self._transfer(list(zip(peers, leaving, arriving, strict=True)))
        frames = read(arriving)
        if self._aborted:  # NCCL ends a transfer then, and leaves what is not written
            raise LostPeerError(f"rank {self._errors.me} was aborted", False)
        return frames

    def _exchange_rests(
        self, peers: list[int], leaving: list[Tensor], lengths: list[int]
    ) -> list[Tensor]:
        """Exchange what frames did not hold, with peers to which or from which there is any."""
        # NCCL hangs if one rank of a pair only sends, so an empty rest is sent as one byte.
        padding = torch.zeros(1, dtype=torch.uint8, device=self.device)
        buffers = [padding.new_empty(max(nbytes, 1)) for nbytes in lengths]
        pairs = [
            (peer, message if message.numel() else padding, buffer)
            for peer, message, buffer, nbytes in zip(peers, leaving, buffers, lengths, strict=True)
            if message.numel() or nbytes
        ]
        self._transfer(pairs)
        return [buffer[:nbytes] for buffer, nbytes in zip(buffers, lengths, strict=True)]

    def _transfer(self, pairs: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Send each peer a tensor, and receive one from it."""
        ops = []
        for peer, message, buffer in pairs:
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
            raise self._errors.lost_by(error) from error


def _parted(begun: Tensor, rest: Tensor, control: int) -> list[Tensor]:
    """Return a message's control and payload, given what came in its frame and the rest of it."""
    if not control:
        return [rest]
    beyond = rest[: control - begun.numel()]
    if beyond.numel():
        begun, rest = torch.cat([begun, read(beyond)]), rest[beyond.numel() :]
    return [begun] if control >= ALL_CONTROL else [begun, rest]
