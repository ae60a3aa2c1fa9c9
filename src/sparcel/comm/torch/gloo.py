"""The engine for Gloo process groups: dense sums over Gloo, messages over sparcel's own mesh.

Gloo sends three packets and wakes two threads at each end for every point-to-point message, which
dominates the time of a small exchange. The mesh, a connection to each other rank, sends a frame
and the bytes of a message, and the thread that waits for the message reads it from the socket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel import _cpu
from sparcel.comm.addresses import gloo_address
from sparcel.comm.engine import Arrived, Bounds, Leaving, PeerErrors
from sparcel.comm.sockets import connect_all
from sparcel.ops import Op

_LATE, _OTHER_LENGTH, _OTHER_CALL = 2, 3, 4
"""The faults of an exchange but a lost connection, numbered as in `csrc/mesh/mesh.hpp`."""

_NO_TAG = 0
"""The tag of the transfers in `GlooEngine.abort`, which never complete."""

_SLICE_SECONDS = 0.2
"""How long a waiting thread may take to notice Ctrl-C, or that the engine was aborted."""


class GlooEngine:
    """A mesh of connections and a Gloo process group, for one communicator.

    Parameters
    ----------
    store
        A store that all ranks share, under a prefix that nothing else uses.
    names
        The numbers by which errors name the ranks, by rank.
    rank
        This process's rank, an index into ``names``.
    timeout
        Seconds that connecting, and an exchange, may take.

    Raises
    ------
    OSError, RuntimeError
        When some rank does not connect within the timeout.
    """

    device = torch.device("cpu")
    carrier = "Gloo"

    def __init__(self, store: Store, names: list[int], rank: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, len(names), timeout
        self._errors = PeerErrors(names, rank)
        self.waiting = self._aborted = False
        # Not by torch's new_group(): it names a group by how many groups the process has made, and
        # hangs if ranks have made different numbers of groups.
        self._group: Any = dist.ProcessGroupGloo(
            store, rank, len(names), timedelta(seconds=timeout)
        )  # torch's stubs lack the methods that all backends have
        sockets = connect_all(PrefixStore("mesh", store), gloo_address(), rank, self.size, timeout)
        self._mesh = _cpu.Mesh(sockets)

    def exchange(self, sends: Leaving, receives: Bounds, call: int, control: int) -> Arrived:
        """See `Engine.exchange`; parts are uint8 and contiguous, and messages arrive whole.

        Raises
        ------
        LostPeerError
            When a connection ends, or the timeout runs out.
        MismatchError
            When a message belongs to another call, or is longer than its bound. Both are checked
            before it is read.
        """
        leaving = [(peer, [to_dlpack(part) for part in parts]) for peer, parts in sends.items()]
        self.waiting = True
        try:
            arrived, fault, peer, length = self._mesh.exchange(
                leaving, list(receives.items()), self.timeout, call
            )
        finally:
            self.waiting = False
        if fault:
            raise self._error(fault, peer, length, f"at most {receives.get(peer)}")
        return {peer: [message] for peer, message in zip(receives, arrived, strict=True)}

    def all_to_all(
        self, message: Tensor, leaving: Sequence[int], arriving: Sequence[int], call: int
    ) -> Tensor:
        """See `Communicator.all_to_all`; raises as `exchange`."""
        out = np.empty(sum(arriving), np.uint8)  # the extension takes arrays faster than tensors
        self.waiting = True
        try:
            fault, peer, length = self._mesh.all_to_all(
                self.rank, message.numpy(), leaving, out, arriving, self.timeout, call
            )
        finally:
            self.waiting = False
        if fault:
            raise self._error(fault, peer, length, arriving[peer])
        return torch.from_numpy(out)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`."""
        deadline = time.monotonic() + self.timeout
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp, (op.name or "").upper()))
        options.timeout = timedelta(seconds=self.timeout)
        self.waiting = True
        try:
            work = self._group.allreduce([tensor], options)
            ended = threading.Event()
            work.get_future().add_done_callback(lambda _: ended.set())
            # torch's own wait notices neither Ctrl-C nor that the connections were closed.
            while not ended.wait(_SLICE_SECONDS):
                if self._aborted:
                    raise self._errors.lost()
            work.wait()
        except RuntimeError as error:  # Gloo's, for a peer that is lost or late
            late = time.monotonic() >= deadline
            raise self._errors.late(self.timeout) if late else self._errors.lost() from error
        finally:
            self.waiting = False

    def probe(self) -> None:
        """See `Engine.probe`."""
        for peer in self.lost():
            raise self._errors.lost(peer)

    def lost(self) -> list[int]:
        """See `Engine.lost`."""
        peers: list[int] = self._mesh.broken()
        return peers

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._aborted = True
        self._mesh.shut()
        # Gloo closes the connections of a group when a transfer times out. It has no other way to
        # close them while something else may still refer to the group.
        for peer in {*range(self.size)} - {self.rank}:
            with suppress(RuntimeError):  # if the peer closed first, this raises and closes nothing
                buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
                transfer = self._group.recv([buffer], peer, _NO_TAG)
                transfer.wait(timedelta(milliseconds=1))

    def _error(self, fault: int, peer: int, length: int, expected: int | str) -> Exception:
        if fault == _OTHER_CALL:
            return self._errors.other_call(peer)
        if fault == _OTHER_LENGTH:
            return self._errors.other_length(peer, length, expected)
        return self._errors.late(self.timeout, peer) if fault == _LATE else self._errors.lost(peer)
