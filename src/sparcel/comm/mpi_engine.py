"""Messages of any size over MPI.

A receive is posted with a buffer as large as the message can be; nothing touches the memory that
the message leaves over, so it costs no more than the message. MPI's own waits neither end when a
process does nor hand the core to ranks that share it. So a rank that waits asks MPI for progress,
looks after its peers and the clock, and hands the core on, over and over.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from sparcel import _cpu
from sparcel.comm.engine import LostPeerError, late, lost
from sparcel.comm.lifeline import Lifeline
from sparcel.errors import MismatchError
from sparcel.ops import Op

_TAG = 0

_WORD_BYTES = 8

_HEADER = struct.Struct("qq")
"""What goes ahead of a padded message: its bound and its length."""

_LOOK = 8
"""In which of its turns a rank that waits looks after its peers and the clock."""

_YIELDS = 50
"""How often it hands its core on before it sleeps in between."""

_NAP_SECONDS = 20e-6

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
"""What transfers use that never ended: MPI may still write to it."""


class MpiEngine:
    """One MPI communicator, used by one of sparcel's alone.

    Parameters
    ----------
    comm
        A communicator that nothing else uses.
    lifeline
        Tells of processes that end.
    names
        What error messages call the ranks, by rank.
    rank
        This process's rank, an index into ``names``.
    timeout
        Seconds that an exchange may take.
    """

    device = torch.device("cpu")

    def __init__(
        self, comm: MPI.Intracomm, lifeline: Lifeline, names: list[int], rank: int, timeout: float
    ) -> None:
        self.names, self.rank, self.timeout = names, rank, timeout
        self._comm, self._lifeline = comm, lifeline
        self._busy = threading.Lock()
        self._aborted = False

    @property
    def waiting(self) -> bool:
        """Whether a thread is inside MPI and waits for a peer."""
        return self._busy.locked()

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Communicator.exchange_parts`."""
        comm = self._comm
        buffers = [_cpu.empty(at_most) for at_most in receives.values()]
        messages = [
            parts[0] if len(parts) == 1 else torch.cat(list(parts)) for parts in sends.values()
        ]
        with self._busy:
            self._look()  # MPICH crashes where it sends to who has ended
            requests = [
                comm.Irecv([buffer.numpy(), MPI.BYTE], peer, _TAG)
                for peer, buffer in zip(receives, buffers, strict=True)
            ]
            requests += [
                comm.Isend([message.numpy(), MPI.BYTE], peer, _TAG)
                for peer, message in zip(sends, messages, strict=True)
            ]
            statuses = [MPI.Status() for _ in requests]
            self._wait(requests, statuses, [*receives, *sends], (buffers, messages))
        return {
            peer: buffer[: status.Get_count(MPI.BYTE)]
            for peer, buffer, status in zip(receives, buffers, statuses, strict=False)
        }

    def gather(self, message: Tensor, at_most: int) -> list[Tensor]:
        """Return the message of every rank, by rank, each padded on the way to ``at_most`` bytes.

        Raises
        ------
        MismatchError, LostPeerError
            As `exchange`.
        """
        if message.numel() > at_most:
            raise MismatchError(
                f"rank {self.names[self.rank]} has {message.numel()} bytes to send, where"
                f" at most {at_most} were agreed on"
            )
        row_bytes = _HEADER.size + -(-at_most // _WORD_BYTES) * _WORD_BYTES
        starts = range(0, len(self.names) * row_bytes, row_bytes)
        # Zeros, as rows may stay what they are where ranks disagree. No tensor: this is the path
        # where a microsecond counts.
        padded = bytearray(len(self.names) * row_bytes)
        _HEADER.pack_into(padded, starts[self.rank], at_most, message.numel())
        begin = starts[self.rank] + _HEADER.size
        padded[begin : begin + message.numel()] = message.numpy().data
        with self._busy:
            self._look()
            request = self._comm.Iallgather(MPI.IN_PLACE, [padded, MPI.BYTE])
            self._wait([request], [MPI.Status()], [], padded)
        bounds, lengths = zip(*(_HEADER.unpack_from(padded, s) for s in starts), strict=True)
        for peer, bound in enumerate(bounds):
            if bound != at_most:
                raise MismatchError(
                    f"rank {self.names[peer]} sent up to {bound} bytes to rank"
                    f" {self.names[self.rank]}, which expected up to {at_most}; the ranks' sizes,"
                    " dtypes or counts differ"
                )
        rows = torch.frombuffer(padded, dtype=torch.uint8)
        return [
            rows[start + _HEADER.size : start + _HEADER.size + length]
            for start, length in zip(starts, lengths, strict=True)
        ]

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`; halves, which MPI does not know, travel as float32."""
        whole = tensor if tensor.dtype in _TYPES else tensor.float()
        with self._busy:
            self._look()
            request = self._comm.Iallreduce(
                MPI.IN_PLACE, [whole.numpy(), _TYPES[whole.dtype]], _REDUCE_OPS[op.name or ""]
            )
            self._wait([request], [MPI.Status()], [], whole)
        if whole is not tensor:
            tensor.copy_(whole)

    def probe(self) -> None:
        """Leave it to the thread that waits, which looks after its peers itself."""

    def abort(self) -> None:
        """End the connections, from any thread; who waits for this rank stops waiting."""
        self._aborted = True
        self._lifeline.end()

    def _wait(
        self,
        requests: list[MPI.Request],
        statuses: list[MPI.Status],
        peers: list[int],
        used: object,
    ) -> None:
        """Wait for all requests, those with ``peers``; ``used`` is the memory that they use."""
        test, deadline = MPI.Request.Testall, time.monotonic() + self.timeout
        turns = 0
        try:
            while not test(requests, statuses):
                turns += 1
                if turns % _LOOK == 0:
                    self._look()
                    if time.monotonic() >= deadline:
                        raise self._late(requests, peers)
                if turns < _YIELDS:
                    os.sched_yield()
                else:
                    time.sleep(_NAP_SECONDS)
        except BaseException as error:
            _abandoned.append((requests, used))
            if isinstance(error, MPI.Exception):
                raise self._explained(error, statuses, peers) from error
            raise

    def _look(self) -> None:
        """Raise when a process has ended."""
        ended = self._lifeline.ended()
        if ended is not None or self._aborted:
            raise lost(self.names[self.rank], None if ended is None else self.names[ended])

    def _late(self, requests: list[MPI.Request], peers: list[int]) -> LostPeerError:
        silent = [
            self.names[peer]
            for request, peer in zip(requests, peers, strict=False)
            if not request.Test()
        ]
        return late(self.names[self.rank], self.timeout, silent[0] if silent else None)

    def _explained(
        self, error: MPI.Exception, statuses: list[MPI.Status], peers: list[int]
    ) -> Exception:
        """Return what an error of MPI's means."""
        me = self.names[self.rank]
        long = [
            f"rank {self.names[peer]}"
            for peer, status in zip(peers, statuses, strict=False)
            if MPI.Get_error_class(status.Get_error()) == MPI.ERR_TRUNCATE
        ]
        if long or error.Get_error_class() == MPI.ERR_TRUNCATE:
            return MismatchError(
                f"{', '.join(long) or 'another rank'} sent more bytes to rank {me} than it"
                " expected at most; the ranks' sizes, dtypes or counts differ"
            )
        return LostPeerError(f"rank {me} lost a peer: {error}", late=False)
