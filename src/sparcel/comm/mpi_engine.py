"""Messages of any size over MPI, and how its ranks tell each other why they failed.

A receive is posted with a buffer as large as the message can be; nothing touches the memory that
the message leaves over, so it costs no more than the message. MPI waits by turning, which keeps
the core from ranks that share it: here a rank that waits hands the core on, and looks at the
clock, and whether another rank has sent notice that it failed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from sparcel.comm.engine import LostPeerError
from sparcel.errors import CommunicationError, MismatchError
from sparcel.ops import Op

_MESSAGE, _NOTICE = 0, 1
"""Tags."""

_NOTICE_BYTES = 4096
"""How much of a cause the others learn."""

_LOOK_SECONDS = 0.001
"""How often a rank that waits looks at the clock and for notices."""

_SETTLE_SECONDS = 1.0
"""How long a notice may take to leave."""

_POLL_SECONDS = 0.001

_REDUCE_OPS = {"sum": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}

_abandoned: list[object] = []
"""Buffers of transfers that never ended: MPI may still write to them."""


class MpiFate:
    """The end of a group of MPI ranks, told by messages of their own.

    Parameters
    ----------
    comm
        The group's own communicator.
    names
        What causes call the ranks, by rank.
    """

    def __init__(self, comm: MPI.Intracomm, names: list[int]) -> None:
        self.comm, self.names = comm, names
        self.cause: str | None = None
        self._notice = bytearray(_NOTICE_BYTES)
        self._arrival: MPI.Request | None = None
        self._stopped = False
        self._looking = threading.Lock()

    def settle(self, cause: str, patience: float = 0.0) -> str:
        """See `Fate.settle`; ranks that fail at once may each name their own cause."""
        _until(lambda: self.learn() is not None, patience)
        if self.cause is None:
            self.cause = cause
            notice = cause.encode()[:_NOTICE_BYTES]
            others = [rank for rank in range(len(self.names)) if rank != self.comm.rank]
            leaving = [self.comm.Isend([notice, MPI.BYTE], rank, _NOTICE) for rank in others]
            if not _until(lambda: MPI.Request.Testall(leaving), _SETTLE_SECONDS):
                _abandoned.append((leaving, notice))
        return self.cause

    def learn(self) -> str | None:
        """See `Fate.learn`."""
        if self.cause is None and self._looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looking.release()
        return self.cause

    def part(self, patience: float) -> bool:
        """See `Fate.part`."""
        return _until(self.comm.Ibarrier().Test, patience)

    def stop(self) -> None:
        """Expect no more notices."""
        with self._looking:
            self._stopped = True
            if self._arrival is not None:
                _cancel([self._arrival])

    def _look(self) -> None:
        if self._stopped:
            return
        if self._arrival is None:
            spec = [self._notice, MPI.BYTE]
            self._arrival = self.comm.Irecv(spec, MPI.ANY_SOURCE, _NOTICE)
        status = MPI.Status()
        if self._arrival.Test(status):
            text = bytes(self._notice[: status.Get_count(MPI.BYTE)])
            self.cause = text.decode(errors="replace")


class MpiEngine:
    """One MPI communicator, used by one of sparcel's alone.

    Parameters
    ----------
    comm
        A communicator that nothing else uses.
    names
        What error messages call the ranks, by rank.
    rank
        This process's rank, an index into ``names``.
    timeout
        Seconds that an exchange may take.
    end
        Where ranks of the family send notice when they fail.
    """

    device = torch.device("cpu")

    def __init__(
        self, comm: MPI.Intracomm, names: list[int], rank: int, timeout: float, end: MpiFate
    ) -> None:
        self.names, self.rank, self.timeout = names, rank, timeout
        self.waiting = self._aborted = False
        self._comm, self._end = comm, end

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Communicator.exchange_parts`."""
        requests, peers = [], [*receives, *sends]
        buffers = []
        for peer, at_most in receives.items():
            buffers.append(buffer := torch.empty(at_most, dtype=torch.uint8))
            requests.append(self._comm.Irecv([buffer.numpy(), MPI.BYTE], peer, _MESSAGE))
        messages = []
        for peer, parts in sends.items():
            message = parts[0] if len(parts) == 1 else torch.cat(list(parts))
            messages.append(message)
            requests.append(self._comm.Isend([message.numpy(), MPI.BYTE], peer, _MESSAGE))
        statuses = [MPI.Status() for _ in requests]
        self._wait(requests, statuses, peers, (buffers, messages))
        return {
            peer: buffer[: status.Get_count(MPI.BYTE)]
            for peer, buffer, status in zip(receives, buffers, statuses, strict=False)
        }

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`; halves, which MPI does not know, travel as float32."""
        whole = tensor if tensor.dtype in _TYPES else tensor.float()
        spec: Any = [whole.numpy(), _TYPES[whole.dtype]]
        request = self._comm.Iallreduce(MPI.IN_PLACE, spec, _REDUCE_OPS[op.name or ""])
        self._wait([request], [MPI.Status()], [None], whole)
        if whole is not tensor:
            tensor.copy_(whole)

    def probe(self) -> None:
        """Leave it to the timeout: MPI does not tell of processes that ended."""

    def abort(self) -> None:
        """Let whoever waits in this process stop waiting; from any thread."""
        self._aborted = True
        if self._end.comm == self._comm:
            self._end.stop()

    def _wait(
        self,
        requests: list[MPI.Request],
        statuses: list[MPI.Status],
        peers: Sequence[int | None],
        buffers: object,
    ) -> None:
        """Wait for all requests; ``peers`` says who each is with, None for everybody."""
        deadline, self.waiting = time.monotonic() + self.timeout, True
        look = 0.0
        try:
            while not MPI.Request.Testall(requests, statuses):
                os.sched_yield()
                if (now := time.monotonic()) >= look:
                    look = now + _LOOK_SECONDS
                    self._check(requests, peers, now >= deadline)
        except MPI.Exception as error:
            _abandoned.append((requests, buffers))
            raise self._explained(error, statuses, peers) from error
        except BaseException:
            _abandoned.append((requests, buffers))
            raise
        finally:
            self.waiting = False

    def _check(self, requests: list[MPI.Request], peers: Sequence[int | None], late: bool) -> None:
        """Raise when the wait is in vain."""
        cause = self._end.learn()
        if cause is not None:
            raise CommunicationError(cause)
        me = self.names[self.rank]
        if self._aborted:
            raise LostPeerError(f"rank {me} closed its communicator", late=False)
        if late:
            silent = [peer for r, peer in zip(requests, peers, strict=True) if not r.Test()]
            raise LostPeerError(
                f"rank {me} waited {self.timeout:g} s for {self._called(silent)}", late=True
            )

    def _explained(
        self, error: MPI.Exception, statuses: list[MPI.Status], peers: Sequence[int | None]
    ) -> Exception:
        """Return what an error of MPI's means."""
        codes = [status.Get_error() for status in statuses]
        for peer, code in zip(peers, codes, strict=True):
            if code and MPI.Get_error_class(code) == MPI.ERR_TRUNCATE:
                return MismatchError(
                    f"{self._called([peer])} sent more bytes to rank {self.names[self.rank]} than"
                    " it expected at most; the ranks' sizes, dtypes or counts differ"
                )
        return LostPeerError(
            f"rank {self.names[self.rank]} lost its connection to {self._called(peers)}: {error}",
            late=False,
        )

    def _called(self, peers: Sequence[int | None]) -> str:
        names = sorted({self.names[peer] for peer in peers if peer is not None})
        if not names:
            return "the others"
        return f"rank {names[0]}" if len(names) == 1 else f"ranks {names}"


def _cancel(receives: Sequence[MPI.Request]) -> None:
    """Take back receives that were posted, but for those whose message has begun to arrive."""
    for receive in receives:
        if receive != MPI.REQUEST_NULL:
            receive.Cancel()
            receive.Test()


def _until(done: Any, patience: float) -> bool:
    """Wait until ``done()``, at most so many seconds, and tell whether it is."""
    deadline = time.monotonic() + patience
    while not (ended := bool(done())) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return ended
