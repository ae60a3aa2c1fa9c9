"""The engine for Gloo process groups: dense sums over Gloo, messages over sparcel's mesh."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
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


class GlooEngine(Mesh):
    """A mesh of connections and a Gloo process group, for one communicator.

    Parameters are those of `Mesh`.
    """

    device = torch.device("cpu")
    carrier = "Gloo"

    def __init__(self, store: Store, names: list[int], rank: int, timeout: float) -> None:
        self._aborted = False
        # Not by torch's new_group(): it names a group by how many groups the process has made, and
        # hangs if ranks have made different numbers of groups.
        self._group: Any = dist.ProcessGroupGloo(
            store, rank, len(names), timedelta(seconds=timeout)
        )  # torch's stubs lack the methods that all backends have
        super().__init__(PrefixStore("mesh", store), names, rank, timeout)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`."""
        deadline = time.monotonic() + self.timeout
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp, (op.name or "").upper()))
        options.timeout = timedelta(seconds=self.timeout)
        with self._waits(deadline):
            work = self._group.allreduce([tensor], options)
            ended = threading.Event()
            work.get_future().add_done_callback(lambda _: ended.set())
            # torch's own wait notices neither Ctrl-C nor that the connections were closed.
            while not ended.wait(_SLICE_SECONDS):
                if self._aborted:
                    raise RuntimeError("aborted")
            work.wait()

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._aborted = True
        super().abort()
        # Gloo closes the connections of a group when a transfer times out. It has no other way to
        # close them while something else may still refer to the group.
        for peer in {*range(len(self.names))} - {self.rank}:
            with suppress(RuntimeError):  # if the peer closed first, this raises and closes nothing
                buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
                transfer = self._group.recv([buffer], peer, _NO_TAG)
                transfer.wait(timedelta(milliseconds=1))

    @contextmanager
    def _waits(self, deadline: float) -> Iterator[None]:
        """Note that a thread waits, and turn Gloo's error for a lost peer into `LostPeerError`."""
        self.waiting = True
        try:
            yield
        except RuntimeError as error:
            me = self.names[self.rank]
            if time.monotonic() >= deadline:
                raise late(me, self.timeout, None) from error
            raise lost(me, None) from error
        finally:
            self.waiting = False
