"""The engine for Gloo process groups: all messages go over a mesh of sparcel's own.

Gloo sends three packets and wakes two threads at each end for every point-to-point message, which
dominates the time of a small exchange. The mesh, a connection to each other rank, sends a frame
and the bytes of a message, and the thread that waits for the message reads it from the socket.
Moreover, Gloo listens for as long as a group lives, and each stranger that connects costs it a file
descriptor; the mesh listens until all ranks are connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel.core.comm.engine import Arrived, Bounds, Leaving, MeshEngine, reduce_around
from sparcel.core.ops import Op

_LATE, _OTHER_LENGTH, _OTHER_CALL = 2, 3, 4
"""The faults of an exchange but a lost connection, numbered as in `csrc/mesh/mesh.hpp`."""


class GlooEngine(MeshEngine):
    """A mesh of connections, for one communicator."""

    carrier = "Gloo"
    waiting = False

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
        leaving = [(peer, [*map(to_dlpack, parts)]) for peer, parts in sends.items()]
        self.waiting = True
        try:
            arrived, fault, peer, length = self._mesh.exchange(
                leaving, list(receives.items()), self.timeout, call
            )
        finally:
            self.waiting = False
        if fault:
            raise self._error(fault, peer, length, f"at most {receives.get(peer)}")
        # The extension makes arrays faster than tensors.
        return {peer: [torch.from_numpy(one)] for peer, one in zip(receives, arrived, strict=True)}

    def all_to_all(
        self, message: Tensor, leaving: Sequence[int], arriving: Sequence[int], call: int
    ) -> Tensor:
        """See `Communicator.all_to_all`; raises as `exchange`."""
        out = np.empty(sum(arriving), np.uint8)  # the extension takes arrays faster than tensors
        self._fill(out, message, leaving, arriving, call)
        return torch.from_numpy(out)

    def all_reduce(self, tensor: Tensor, op: Op, call: int) -> None:
        """See `Engine.all_reduce`; around a ring."""

        def swap(to: int, leaving: Tensor, source: int, arriving: Tensor) -> None:
            sent, due = [0] * self.size, [0] * self.size
            sent[to], due[source] = leaving.numel(), arriving.numel()
            self._fill(arriving.numpy(), leaving, sent, due, call)

        reduce_around(tensor, op, self.rank, self.size, swap)

    def _fill(
        self,
        out: np.ndarray[Any, Any],
        message: Tensor,
        leaving: Sequence[int],
        arriving: Sequence[int],
        call: int,
    ) -> None:
        """Do what `all_to_all` does, into memory that is there."""
        self.waiting = True
        try:
            fault, peer, length = self._mesh.all_to_all(
                self.rank, message.numpy(), leaving, out, arriving, self.timeout, call
            )
        finally:
            self.waiting = False
        if fault:
            raise self._error(fault, peer, length, arriving[peer])

    def _error(self, fault: int, peer: int, length: int, expected: int | str) -> Exception:
        if fault == _OTHER_CALL:
            return self._errors.other_call(peer)
        if fault == _OTHER_LENGTH:
            return self._errors.other_length(peer, length, expected)
        return self._errors.late(self.timeout, peer) if fault == _LATE else self._errors.lost(peer)
