"""Messages of any size over sparcel's own connections, one to each peer.

Gloo sends three packets and wakes two threads at each end for every point-to-point message, which
dominates the time of a small exchange. The mesh sends only a frame and the bytes of a message,
and the thread that waits for the message reads it from the socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel import _cpu
from sparcel.comm.addresses import gloo_address
from sparcel.comm.engine import late, lost, other_call, other_length, too_long
from sparcel.comm.sockets import connect_all


class Mesh:
    """A connection to each other rank; only one thread at a time exchanges messages.

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

    def __init__(self, store: Store, names: list[int], rank: int, timeout: float) -> None:
        self.names, self.rank, self.timeout = names, rank, timeout
        self.waiting = False
        sockets = connect_all(store, gloo_address(), rank, len(names), timeout)
        self._mesh = _cpu.Mesh([-1 if peer is None else peer.detach() for peer in sockets])

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, int],
        call: int,
        control: int,
    ) -> dict[int, list[Tensor]]:
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
            self._fail(fault, peer, length, receives.get(peer, 0))
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
        if fault == _TOO_LONG:  # or too short
            raise other_length(self.names[peer], length, self.names[self.rank], arriving[peer])
        if fault:
            self._fail(fault, peer)
        return torch.from_numpy(out)

    def probe(self) -> None:
        """See `Engine.probe`."""
        peer = self._mesh.broken()
        if peer < len(self.names):
            self._fail(_LOST, peer)

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._mesh.shut()

    def _fail(self, fault: int, peer: int, length: int = 0, at_most: int = 0) -> None:
        me, name = self.names[self.rank], self.names[peer]
        if fault == _OTHER_CALL:
            raise other_call(name, me)
        if fault == _TOO_LONG:
            raise too_long(name, length, me, at_most)
        raise late(me, self.timeout, name) if fault == _LATE else lost(me, name)


_LOST, _LATE, _TOO_LONG, _OTHER_CALL = 1, 2, 3, 4
"""The ways in which an exchange fails, numbered as in `csrc/mesh/mesh.hpp`."""
