"""Messages of any size over TCP connections of our own, one to each peer.

What Gloo takes for a point-to-point message, three packets and the wake-ups of two threads at
either end, is most of what a small exchange costs. Here a message is its length and its bytes, and
the thread that waits for it reads it from the socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel import _cpu
from sparcel.comm.engine import late, lost, too_long
from sparcel.comm.sockets import connect_all


class Mesh:
    """A connection to each other rank, used from one thread at a time.

    Parameters
    ----------
    store
        Where the ranks meet; all give the same, under a prefix used by no one else.
    names
        What error messages call the ranks, by rank.
    rank
        This process's rank, an index into ``names``.
    timeout
        Seconds that connecting, and an exchange, may take.

    Raises
    ------
    OSError, RuntimeError
        When not all ranks connected within the timeout.
    """

    def __init__(self, store: Store, names: list[int], rank: int, timeout: float) -> None:
        self.names, self.rank, self.timeout = names, rank, timeout
        sockets = connect_all(store, rank, len(names), timeout)
        self._mesh = _cpu.Mesh([-1 if peer is None else peer.detach() for peer in sockets])

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """Send messages given in parts (uint8, contiguous) and receive, as `Communicator`.

        Raises
        ------
        LostPeerError, MismatchError
            A message that is longer than its bound is found by its length, before it is read.
        """
        leaving = [(peer, [to_dlpack(part) for part in parts]) for peer, parts in sends.items()]
        arrived, fault, peer, length = self._mesh.exchange(
            leaving, list(receives.items()), self.timeout
        )
        if fault:
            self._fail(fault, peer, length, receives.get(peer, 0))
        return dict(zip(receives, arrived, strict=True))

    def probe(self) -> None:
        """Raise `LostPeerError` when a connection has ended; from any thread."""
        peer = self._mesh.broken()
        if peer < len(self.names):
            self._fail(_LOST, peer)

    def abort(self) -> None:
        """End all connections, from any thread; who waits for this rank stops waiting."""
        self._mesh.shut()

    def _fail(self, fault: int, peer: int, length: int = 0, at_most: int = 0) -> None:
        me, name = self.names[self.rank], self.names[peer]
        if fault == _TOO_LONG:
            raise too_long(name, length, me, at_most)
        raise late(me, self.timeout, name) if fault == _LATE else lost(me, name)


_LOST, _LATE, _TOO_LONG = 1, 2, 3
"""How an exchange fails; `csrc/mesh.hpp` numbers them."""
