"""Messages of any size over Gloo's point-to-point transfers.

Gloo sends nothing before the receiver has posted a buffer and said so, and it ends the process
when a message is longer than that buffer. So every rank keeps `WINDOW` buffers of `FRAME_BYTES`
posted for every peer, and a message starts with a frame that surely fits: its size, then as much
of it as the frame holds. The rest of a longer one goes in a second transfer, for which the
receiver posts a buffer once it knows and has checked the size. A message that fits its frame thus
takes one latency, a longer one three. With 1 ms to the other rank, exchanges of 100 bytes took
1.4 ms each (2.8 ms with one buffer posted, 2.3 ms with Gloo's transfers as they are), of 400 KB
2.4 ms (5.9 ms with frames of 64 KiB).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from sparcel.comm.engine import LostPeerError
from sparcel.errors import MismatchError
from sparcel.ops import Op

FRAME_BYTES = 1 << 20
"""Largest first frame, its header included; a constant, so that no two ranks can disagree."""

WINDOW = 2
"""Frames posted ahead for each peer, so that the news of a posting is there before it is needed."""

_HEADER_BYTES = 8
"""The message's size; the payload that follows stays aligned to 8 bytes."""

_FIRST_BYTES = FRAME_BYTES - _HEADER_BYTES

_COPY_BYTES = 64 << 10
"""Shorter payloads are copied out of their frame, so that a view cannot keep all of it alive."""

_TAGS = 1 << 29
"""Frame i has tag 2i, the rest of its message 2i + 1; Gloo's tags have 31 bits."""

_NO_TAG = 2 * _TAGS
"""What no message has."""

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


@dataclass
class _Frame:
    """A buffer posted for the peer's next message but some."""

    number: int
    buffer: Tensor
    arrival: dist.Work


@dataclass
class _Peer:
    """What is under way between this rank and another."""

    sent: int = 0
    posted: int = 0
    frames: deque[_Frame] = field(default_factory=deque)


class GlooEngine:
    """One process group of Gloo's, used by one communicator alone.

    Parameters
    ----------
    store
        Where the ranks meet; all give the same, under a prefix used by no one else.
    names
        What error messages call the ranks, by rank.
    rank
        This process's rank, an index into ``names``.
    timeout
        Seconds that an exchange may take.
    """

    device = torch.device("cpu")

    def __init__(self, store: Store, names: list[int], rank: int, timeout: float) -> None:
        self.names, self.rank, self.timeout = names, rank, timeout
        self.waiting = False
        # Straight from the class: torch's new_group() names a group after how many groups the
        # process has made, and hangs where ranks have made different ones.
        self._group: Any = dist.ProcessGroupGloo(
            store, rank, len(names), timedelta(seconds=timeout)
        )  # torch's stubs leave out what every engine has
        self._peers = {peer: _Peer() for peer in range(len(names)) if peer != rank}
        for peer in self._peers:
            for _ in range(WINDOW):
                buffer = torch.empty(FRAME_BYTES, dtype=torch.uint8)
                self._post(peer, buffer, deadline=float("inf"))

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Communicator.exchange`."""
        deadline = time.monotonic() + self.timeout
        leaving = self._send(sends, deadline)
        received, arriving = {}, []
        for peer, at_most in receives.items():
            message, rest = self._receive(peer, at_most, deadline)
            received[peer] = message
            if rest is not None:
                arriving.append((peer, rest))
        for peer, work in arriving + leaving:
            self._wait(work, peer, deadline)
        return received

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`."""
        deadline = time.monotonic() + self.timeout
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_REDUCE_OPS[op.name or ""])
        options.timeout = timedelta(seconds=self.timeout)
        with self._losing(None, deadline), self._waits():
            self._group.allreduce([tensor], options).wait()

    def probe(self) -> None:
        """Raise `LostPeerError` when a connection is broken; from any thread."""
        for peer in self._peers:  # on a broken connection no receive can be posted
            with self._losing(peer, deadline=float("inf")):
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NO_TAG)

    def abort(self) -> None:
        """Close all connections at once, so that whoever waits for this rank stops waiting."""
        # Gloo closes the connections of a group when one of its transfers runs out of time, and
        # offers no other way that does not hang on who else still holds the group.
        for anyone in self._peers:
            with suppress(RuntimeError):  # a peer that closed first raises at once and closes none
                never = self._group.recv([torch.empty(1, dtype=torch.uint8)], anyone, _NO_TAG)
                never.wait(timedelta(milliseconds=1))

    def _send(self, sends: Mapping[int, Tensor], deadline: float) -> list[tuple[int, dist.Work]]:
        leaving = []
        frames: dict[int, Tensor] = {}  # one a message, however many it goes to
        for rank, message in sends.items():
            peer = self._peers[rank]
            if id(message) not in frames:
                size = torch.tensor([message.numel()]).view(torch.uint8)
                frames[id(message)] = torch.cat((size, message[:_FIRST_BYTES]))
            tag, peer.sent = 2 * (peer.sent % _TAGS), peer.sent + 1
            with self._losing(rank, deadline):
                leaving.append((rank, self._group.send([frames[id(message)]], rank, tag)))
                if message.numel() > _FIRST_BYTES:
                    rest = message[_FIRST_BYTES:]
                    leaving.append((rank, self._group.send([rest], rank, tag + 1)))
        return leaving

    def _receive(self, rank: int, at_most: int, deadline: float) -> tuple[Tensor, dist.Work | None]:
        """Return a peer's next message and, if it is not all there yet, what brings the rest."""
        frames = self._peers[rank].frames
        if not frames:  # the last posting found the connection broken, and so will this
            self._post(rank, torch.empty(0, dtype=torch.uint8), deadline)
        frame = frames.popleft()
        self._wait(frame.arrival, rank, deadline)
        nbytes = int(frame.buffer[:_HEADER_BYTES].view(torch.int64))
        if nbytes > at_most:
            raise MismatchError(
                f"rank {self.names[rank]} sent {nbytes} bytes to rank {self.names[self.rank]},"
                f" which expected at most {at_most}; the ranks' sizes, dtypes or counts differ"
            )
        payload = frame.buffer[_HEADER_BYTES : _HEADER_BYTES + nbytes]
        if _COPY_BYTES < nbytes <= _FIRST_BYTES:
            message, rest, free = payload, None, torch.empty_like(frame.buffer)
        else:
            message, rest, free = torch.empty(nbytes, dtype=torch.uint8), None, frame.buffer
            message[:_FIRST_BYTES] = payload
        if nbytes > _FIRST_BYTES:
            tag = 2 * (frame.number % _TAGS) + 1
            with self._losing(rank, deadline):
                rest = self._group.recv([message[_FIRST_BYTES:]], rank, tag)
        # This message is here, so a peer that has left since is no reason to fail before the next.
        with suppress(LostPeerError):
            self._post(rank, free, deadline)
        return message, rest

    def _post(self, rank: int, buffer: Tensor, deadline: float) -> None:
        peer = self._peers[rank]
        with self._losing(rank, deadline):
            arrival = self._group.recv([buffer], rank, 2 * (peer.posted % _TAGS))
        peer.frames.append(_Frame(peer.posted, buffer, arrival))
        peer.posted += 1

    def _wait(self, work: dist.Work, rank: int, deadline: float) -> None:
        left = max(deadline - time.monotonic(), 0.001)
        with self._losing(rank, deadline), self._waits():
            work.wait(timedelta(seconds=left))

    @contextmanager
    def _waits(self) -> Iterator[None]:
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    @contextmanager
    def _losing(self, rank: int | None, deadline: float) -> Iterator[None]:
        """Turn what Gloo raises on a broken connection into `LostPeerError`; None is any rank."""
        try:
            yield
        except RuntimeError as error:
            me = self.names[self.rank]
            whom = "the others" if rank is None else f"rank {self.names[rank]}"
            if time.monotonic() >= deadline:
                text = f"rank {me} waited {self.timeout:g} s for {whom}"
                raise LostPeerError(text, late=True) from error
            text = f"rank {me} lost its connection to {whom}, whose process or network failed"
            raise LostPeerError(text, late=False) from error
