"""The engine for NCCL process groups; both sides of an NCCL transfer must know its length.

Messages with bounds travel as rows of one length: the host queues the transfer, and waits for
nothing. Any other exchange begins with frames, which tell lengths and hold control, and for which
the host waits.

NCCL compares no calls, and reports no process that died. So

- a frame holds the fingerprint of its call, and of all transfers without frames before it; ranks
  that differ in one of these find it at their next exchange with frames; blocks of known lengths
  have no frames and carry the same, which is compared on the device; a step whose last transfer
  has neither sends it alone (`NcclCommunicator.confirm`);
- what is in a row begins with a header, which its reader checks on the device: of another length,
  size or format it is a fault;
- ranks that wait for one another in different calls are found by the executor's monitor;
- each rank keeps an idle connection to every other one, which the kernel closes when its process
  ends. The monitor looks at them, and at the timeout, while a transfer is under way.

Whoever finds something aborts the group. That ends NCCL's transfers on this rank and leaves what
they were to write as it was, so the executor lets no job return a result after it.

This code follows torch's documentation. `tests/comm/torch/test_nccl.py` runs it over Gloo's process
groups, and `tests/gpu/test_nccl.py` does the same over NCCL's, on one GPU that ranks share; the
latter has not run yet.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from sparcel.core.comm.engine import (
    ALL_CONTROL,
    Arrived,
    Bounds,
    Leaving,
    LostPeerError,
    MeshEngine,
)
from sparcel.core.device import later, put, read
from sparcel.core.ops import Op

_FRAME_BYTES = 4096
"""The bytes of a frame: the length and the call of a message, and the control that fits."""

_HEAD_BYTES = 16

_WATCHDOG_SECONDS = 60.0
"""How long after the timeout torch's watchdog ends the process, if all else has failed."""

_PAST_BITS = 31
"""The bits, above those of a call, that tell of the transfers without frames before it."""

Pair = tuple[int, Tensor, Tensor]
"""A peer, what it gets, and where what it sends goes."""


class NcclEngine(MeshEngine):
    """NCCL's connections, and idle ones, for one communicator.

    Parameters
    ----------
    store, members, rank, timeout
        As for `MeshEngine`; the members are ranks in the default group.
    device
        This process's GPU.
    """

    carrier = "NCCL"
    hides_aborts = True

    def __init__(
        self, store: Store, members: list[int], rank: int, timeout: float, device: torch.device
    ) -> None:
        super().__init__(store, members, rank, timeout)
        self.device = device
        self._group = self._joined(members)
        self._works: Sequence[dist.Work] = ()
        self._since = time.monotonic()
        self._past = 0

    @property
    def waiting(self) -> bool:
        """Whether a transfer is under way."""
        return not all(work.is_completed() for work in self._works)

    def swap(self, rows: Tensor, call: int) -> Tensor:
        """Send rank r the r-th row; return the rows that came, by source.

        The host does not wait.
        """
        arrived = torch.empty_like(rows)
        self._remember(call, rows.numel())
        self._transfer(_swap, arrived, rows)
        return arrived

    def spread(self, row: Tensor, call: int) -> Tensor:
        """Send all ranks a row; return those of all ranks. The host does not wait."""
        arrived = row.new_empty(self.size, row.numel())
        self._remember(call, row.numel())
        self._transfer(_spread, arrived.view(-1), row)
        return arrived

    def exchange(self, sends: Leaving, receives: Bounds, call: int, control: int) -> Arrived:
        """See `Engine.exchange`; messages arrive as control, payload, or both in this order.

        The host waits for the frames, which travel first and hold the control that fits into them.
        What is left follows in a second transfer, and the host reads nothing of a payload.
        """
        peers = list(dict.fromkeys([*sends, *receives]))
        framed = min(control, _FRAME_BYTES - _HEAD_BYTES)
        leaving = [self._divided(sends.get(peer, ()), control, framed) for peer in peers]
        call = self._marked(call)
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

    def gather(self, block: Tensor, nbytes: int, call: int) -> Tensor:
        """Send all ranks a block of up to ``nbytes`` bytes; return rows that begin with the blocks.

        The host does not wait; `sparcel.core.device.later` tells ranks in other calls.
        """
        mark = put([self._marked(call)], self.device, torch.int64).view(torch.uint8)
        begun = self._on_device([block])
        row = torch.cat([begun, begun.new_empty(nbytes - begun.numel()), mark])
        arrived = row.new_empty(self.size, row.numel())
        self._transfer(_spread, arrived.view(-1), row)
        others = (arrived[:, nbytes:] != mark).any(dim=1)
        later(others.any(), lambda: self._errors.other_call(read(others).tolist().index(True)))
        return arrived[:, :nbytes]

    def all_reduce(self, tensor: Tensor, op: Op, call: int) -> None:
        """See `Engine.all_reduce`."""
        self._remember(call, tensor.numel())
        self._transfer(_reduce, tensor, op)

    def probe(self) -> None:
        """See `Engine.probe`; raises as well when a transfer takes longer than the timeout."""
        super().probe()
        if self.waiting and time.monotonic() - self._since > self.timeout:
            raise self._errors.late(self.timeout)

    @override
    def abort(self) -> None:
        super().abort()
        self._group.abort()

    def _joined(self, members: list[int]) -> dist.ProcessGroup:
        """Return the process group."""
        group: dist.ProcessGroup = dist.new_group(
            members,
            timeout=timedelta(seconds=self.timeout + _WATCHDOG_SECONDS),
            backend="nccl",
            use_local_synchronization=True,
            device_id=self.device,
        )
        return group

    def _remember(self, call: int, length: int) -> None:
        """Let later frames tell of a transfer without frames."""
        self._past = (31 * self._past + 7 * call + length) % (1 << _PAST_BITS)

    def _marked(self, call: int) -> int:
        """Return the fingerprint of a call with that of all transfers without frames before it."""
        return call | self._past << 32

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
        self._transfer(_exchange, list(zip(peers, leaving, arriving, strict=True)))
        frames = read(arriving)
        if self._aborted:  # another thread did, while this one waited
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
        self._transfer(_exchange, pairs)
        return [buffer[:nbytes] for buffer, nbytes in zip(buffers, lengths, strict=True)]

    def _transfer(self, begin: Callable[..., Sequence[dist.Work]], *args: object) -> None:
        """Queue a transfer, after which what is queued on the current stream runs."""
        try:
            self._since = time.monotonic()  # first: the monitor never sees new works with old times
            self._works = begin(self._group, *args)
            for work in self._works:
                work.wait()
        except RuntimeError as error:  # of which torch's errors of communication are subclasses
            raise self._errors.lost_by(error) from error


def _swap(group: dist.ProcessGroup, arrived: Tensor, rows: Tensor) -> list[dist.Work]:
    return [dist.all_to_all_single(arrived, rows, group=group, async_op=True)]


_gather: Callable[..., dist.Work] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # the name up to torch 2.12
"""Writes the tensors of all ranks end to end."""


def _spread(group: dist.ProcessGroup, arrived: Tensor, row: Tensor) -> list[dist.Work]:
    return [_gather(arrived, row, group=group, async_op=True)]


def _reduce(group: dist.ProcessGroup, tensor: Tensor, op: Op) -> list[dist.Work]:
    reduce_op = getattr(dist.ReduceOp, (op.name or "").upper())
    return [dist.all_reduce(tensor, reduce_op, group=group, async_op=True)]


def _exchange(group: dist.ProcessGroup, pairs: Sequence[Pair]) -> list[dist.Work]:
    """Send each peer a tensor, and receive one from it."""
    ops = []
    for peer, message, buffer in pairs:
        ops.append(dist.P2POp(dist.isend, message, group=group, group_peer=peer))
        ops.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer))
    return dist.batch_isend_irecv(ops) if ops else []


def _parted(begun: Tensor, rest: Tensor, control: int) -> list[Tensor]:
    """Return a message's control and payload, given what came in its frame and the rest of it."""
    if not control:
        return [rest]
    beyond = rest[: control - begun.numel()]
    if beyond.numel():
        begun, rest = torch.cat([begun, read(beyond)]), rest[beyond.numel() :]
    return [begun] if control >= ALL_CONTROL else [begun, rest]
