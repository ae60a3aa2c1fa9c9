"""Messages of any size over MPI.

A receive is posted with a buffer of the message's maximal size. Nothing touches the memory beyond
the message, so a larger buffer costs nothing. MPI's own waits do not return when a process dies,
and do not yield the core to other ranks. A waiting rank therefore polls: it asks MPI for progress,
checks for dead peers and for the timeout, and yields its core.

MPI does not report dead processes. Each rank keeps an idle connection to every other rank; the
kernel closes it when the process dies.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from sparcel import _cpu
from sparcel.core.comm.engine import Arrived, Bounds, Leaving, MeshEngine, whole
from sparcel.core.ops import Op
from sparcel.errors import MismatchError

_WORD_BYTES = 8

_HEADER = struct.Struct("IIq")
"""Precedes a padded message: its bound, its call and its length."""

_POLLS_PER_CHECK = 8
"""Check for dead peers and for the timeout once every so many polls."""

_YIELDING_POLLS = 50
"""After so many polls, sleep between polls instead of only yielding the core."""

_SLEEP_SECONDS = 20e-6

_REDUCE_OPS = {"sum": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}

abandoned: list[object] = []
"""Requests that never completed, with their buffers, to which MPI may still write."""


class MpiEngine(MeshEngine):
    """An MPI communicator that one communicator of sparcel uses.

    Parameters
    ----------
    comm
        An MPI communicator that nothing else uses.
    store, names, rank, timeout, address
        As for `MeshEngine`, on whose connections nobody writes.
    """

    carrier = "MPI"

    def __init__(
        self,
        comm: MPI.Intracomm,
        store: Store,
        names: list[int],
        rank: int,
        timeout: float,
        address: str,
    ) -> None:
        super().__init__(store, names, rank, timeout, address)
        self._comm = comm
        # The standard defines this for the world alone: Open MPI's other communicators lack it.
        largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        assert isinstance(largest, int)
        self._tags = largest + 1
        self._busy = threading.Lock()

    @property
    def waiting(self) -> bool:
        """Whether a thread is inside MPI and waits for a peer."""
        return self._busy.locked()

    def exchange(self, sends: Leaving, receives: Bounds, call: int, control: int) -> Arrived:
        """See `Engine.exchange`; a message's tag tells its call, and messages arrive whole."""
        comm, tag = self._comm, call % self._tags
        buffers = [_cpu.empty(at_most) for at_most in receives.values()]
        messages = [whole(parts) for parts in sends.values()]
        with self._busy:
            self._check_peers()  # MPICH crashes when it sends to a dead process
            requests = [
                comm.Irecv([buffer.numpy(), MPI.BYTE], peer, MPI.ANY_TAG)
                for peer, buffer in zip(receives, buffers, strict=True)
            ]
            requests += [
                comm.Isend([message.numpy(), MPI.BYTE], peer, tag)
                for peer, message in zip(sends, messages, strict=True)
            ]
            statuses = [MPI.Status() for _ in requests]
            self._wait(requests, statuses, [*receives, *sends], (buffers, messages))
        for peer, status in zip(receives, statuses, strict=False):
            if status.Get_tag() != tag:
                raise self._errors.other_call(peer)
        return {
            peer: [buffer[: status.Get_count(MPI.BYTE)]]
            for peer, buffer, status in zip(receives, buffers, statuses, strict=False)
        }

    def gather(self, parts: Sequence[Tensor], at_most: int, call: int) -> list[Tensor]:
        """Return the messages of all ranks, by rank; each travels padded to ``at_most`` bytes.

        Raises
        ------
        MismatchError, LostPeerError
            As `exchange`.
        """
        nbytes = sum([part.numel() for part in parts])
        if nbytes > at_most:
            raise MismatchError(
                f"rank {self._errors.me} must send at most {at_most} bytes, got a message"
                f" of {nbytes}"
            )
        slot_bytes = _HEADER.size + -(-at_most // _WORD_BYTES) * _WORD_BYTES
        starts = range(0, self.size * slot_bytes, slot_bytes)
        # Zeros, because slots may stay unwritten if ranks disagree on the bound. A bytearray is
        # faster than a tensor, and every microsecond counts on this path.
        padded = bytearray(self.size * slot_bytes)
        _HEADER.pack_into(padded, starts[self.rank], at_most, call, nbytes)
        begin = starts[self.rank] + _HEADER.size
        for part in parts:
            padded[begin : begin + part.numel()] = part.numpy().data
            begin += part.numel()
        with self._busy:
            self._check_peers()
            request = self._comm.Iallgather(MPI.IN_PLACE, [padded, MPI.BYTE])
            self._wait([request], [MPI.Status()], [], padded)
        headers = [_HEADER.unpack_from(padded, start) for start in starts]
        for peer, (bound, theirs, _) in enumerate(headers):
            if theirs != call:
                raise self._errors.other_call(peer)
            if bound != at_most:
                raise self._errors.other_length(peer, f"up to {bound}", f"up to {at_most}")
        slots = torch.frombuffer(padded, dtype=torch.uint8)
        return [
            slots[start + _HEADER.size : start + _HEADER.size + length]
            for start, (*_, length) in zip(starts, headers, strict=True)
        ]

    def all_reduce(self, tensor: Tensor, op: Op, call: int) -> None:
        """See `Engine.all_reduce`; half precision, which MPI lacks, travels as float32."""
        sent = tensor if tensor.dtype in _TYPES else tensor.float()
        with self._busy:
            self._check_peers()
            request = self._comm.Iallreduce(
                MPI.IN_PLACE, [sent.numpy(), _TYPES[sent.dtype]], _REDUCE_OPS[op.name or ""]
            )
            self._wait([request], [MPI.Status()], [], sent)
        if sent is not tensor:
            tensor.copy_(sent)

    def _wait(
        self,
        requests: list[MPI.Request],
        statuses: list[MPI.Status],
        peers: list[int],
        used: object,
    ) -> None:
        """Wait for all requests.

        Parameters
        ----------
        requests, statuses
            The requests, and where MPI writes their outcomes.
        peers
            The peer of each request; empty for collective requests.
        used
            The memory that the requests use.
        """
        test, deadline = MPI.Request.Testall, time.monotonic() + self.timeout
        polls = 0
        try:
            while not test(requests, statuses):
                polls += 1
                if polls % _POLLS_PER_CHECK == 0:
                    self._check_peers()
                    if time.monotonic() >= deadline:
                        due = zip(requests, peers, strict=False)
                        silent = (peer for request, peer in due if not request.Test())
                        raise self._errors.late(self.timeout, next(silent, None))
                if polls < _YIELDING_POLLS:
                    os.sched_yield()
                else:
                    time.sleep(_SLEEP_SECONDS)
        except BaseException as error:
            abandoned.append((requests, used))
            if isinstance(error, MPI.Exception):
                raise self._explained(error, statuses, peers) from error
            raise

    def _check_peers(self) -> None:
        """Raise when a peer is dead, or the engine was aborted."""
        dead = self.lost()
        if dead or self._aborted:
            raise self._errors.lost(dead[0] if dead else None)

    def _explained(
        self, error: MPI.Exception, statuses: list[MPI.Status], peers: list[int]
    ) -> Exception:
        """Return the error that an MPI error stands for."""
        long = [
            f"rank {self._errors.names[peer]}"
            for peer, status in zip(peers, statuses, strict=False)
            if MPI.Get_error_class(status.Get_error()) == MPI.ERR_TRUNCATE
        ]
        if long or error.Get_error_class() == MPI.ERR_TRUNCATE:
            return MismatchError(
                f"{', '.join(long) or 'another rank'} sent more bytes to rank"
                f" {self._errors.me} than it expected; the ranks' sizes, dtypes or counts differ"
            )
        return self._errors.lost_by(error)
