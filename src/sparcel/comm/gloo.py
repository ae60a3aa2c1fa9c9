"""The engine for process groups of Gloo's: its dense all-reduce, and messages beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from sparcel.comm.engine import late, lost
from sparcel.comm.mesh import Mesh
from sparcel.ops import Op

_NO_TAG = 0
"""The tag of transfers that never come about."""

_SLICE_SECONDS = 0.2
"""How long Ctrl-C, or an end of the connections, may go unseen."""

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


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
        self.waiting = self._aborted = False
        # Straight from the class: torch's new_group() names a group after how many groups the
        # process has made, and hangs where ranks have made different ones.
        self._group: Any = dist.ProcessGroupGloo(
            store, rank, len(names), timedelta(seconds=timeout)
        )  # torch's stubs leave out what every engine has
        self._mesh = Mesh(PrefixStore("mesh", store), names, rank, timeout)
        self._others = [peer for peer in range(len(names)) if peer != rank]

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Communicator.exchange_parts`."""
        with self._waits():
            return self._mesh.exchange(sends, receives)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`."""
        deadline = time.monotonic() + self.timeout
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_REDUCE_OPS[op.name or ""])
        options.timeout = timedelta(seconds=self.timeout)
        with self._losing(deadline), self._waits():
            work = self._group.allreduce([tensor], options)
            ended = threading.Event()
            work.get_future().add_done_callback(lambda _: ended.set())
            # torch's own wait sees neither Ctrl-C nor that the connections were closed.
            while not ended.wait(_SLICE_SECONDS):
                if self._aborted:
                    raise RuntimeError("aborted")
            work.wait()

    def probe(self) -> None:
        """Raise `LostPeerError` when a connection has ended; from any thread."""
        self._mesh.probe()

    def abort(self) -> None:
        """Close all connections at once, so that whoever waits for this rank stops waiting."""
        self._aborted = True
        self._mesh.abort()
        # Gloo closes the connections of a group when one of its transfers runs out of time, and
        # offers no other way that does not hang on who else still holds the group.
        for anyone in self._others:
            with suppress(RuntimeError):  # a peer that closed first raises at once and closes none
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                never = self._group.recv([nothing], anyone, _NO_TAG)
                never.wait(timedelta(milliseconds=1))

    @contextmanager
    def _waits(self) -> Iterator[None]:
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    @contextmanager
    def _losing(self, deadline: float) -> Iterator[None]:
        """Turn what Gloo raises on a broken connection into `LostPeerError`."""
        try:
            yield
        except RuntimeError as error:
            me = self.names[self.rank]
            if time.monotonic() >= deadline:
                raise late(me, self.timeout, None) from error
            raise lost(me, None) from error
