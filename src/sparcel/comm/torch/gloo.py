"""The engine for Gloo process groups: dense sums over Gloo, messages over sparcel's mesh."""

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
from sparcel.comm.torch.mesh import Mesh
from sparcel.ops import Op

_NO_TAG = 0
"""The tag of the transfers in `GlooEngine.abort`, which never complete."""

_SLICE_SECONDS = 0.2
"""How long a waiting thread may take to notice Ctrl-C, or that the engine was aborted."""


class GlooEngine:
    """A Gloo process group and a mesh of TCP connections, for one communicator.

    Parameters
    ----------
    store
        A store that all ranks share, under a prefix that nothing else uses.
    names
        The numbers by which errors name the ranks, by rank.
    rank
        This process's rank, an index into ``names``.
    timeout
        Seconds that an exchange may take.
    """

    device = torch.device("cpu")
    carrier = "Gloo"

    def __init__(self, store: Store, names: list[int], rank: int, timeout: float) -> None:
        self.names, self.rank, self.timeout = names, rank, timeout
        self.waiting = self._aborted = False
        # Not by torch's new_group(): it names a group by how many groups the process has made, and
        # hangs if ranks have made different numbers of groups.
        self._group: Any = dist.ProcessGroupGloo(
            store, rank, len(names), timedelta(seconds=timeout)
        )  # torch's stubs lack the methods that all backends have
        self._mesh = Mesh(PrefixStore("mesh", store), names, rank, timeout)
        self._others = [peer for peer in range(len(names)) if peer != rank]

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int], call: int
    ) -> dict[int, Tensor]:
        """See `Engine.exchange`."""
        with self._waits():
            return self._mesh.exchange(sends, receives, call)

    def all_to_all(
        self, message: Tensor, leaving: Sequence[int], arriving: Sequence[int], call: int
    ) -> Tensor:
        """See `Communicator.all_to_all`."""
        with self._waits():
            return self._mesh.all_to_all(message, leaving, arriving, call)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`."""
        deadline = time.monotonic() + self.timeout
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp, (op.name or "").upper()))
        options.timeout = timedelta(seconds=self.timeout)
        with self._translating_errors(deadline), self._waits():
            work = self._group.allreduce([tensor], options)
            ended = threading.Event()
            work.get_future().add_done_callback(lambda _: ended.set())
            # torch's own wait notices neither Ctrl-C nor that the connections were closed.
            while not ended.wait(_SLICE_SECONDS):
                if self._aborted:
                    raise RuntimeError("aborted")
            work.wait()

    def probe(self) -> None:
        """See `Engine.probe`."""
        self._mesh.probe()

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._aborted = True
        self._mesh.abort()
        # Gloo closes the connections of a group when a transfer times out. It has no other way to
        # close them while something else may still refer to the group.
        for peer in self._others:
            with suppress(RuntimeError):  # if the peer closed first, this raises and closes nothing
                buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
                transfer = self._group.recv([buffer], peer, _NO_TAG)
                transfer.wait(timedelta(milliseconds=1))

    @contextmanager
    def _waits(self) -> Iterator[None]:
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    @contextmanager
    def _translating_errors(self, deadline: float) -> Iterator[None]:
        """Turn Gloo's error for a broken connection into `LostPeerError`."""
        try:
            yield
        except RuntimeError as error:
            me = self.names[self.rank]
            if time.monotonic() >= deadline:
                raise late(me, self.timeout, None) from error
            raise lost(me, None) from error
