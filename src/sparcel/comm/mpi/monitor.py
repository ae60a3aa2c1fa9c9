"""Detects dead peers.

MPI does not report dead processes. Each rank keeps an idle TCP connection to every other rank; the
kernel closes it when the process dies.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from sparcel.comm.sockets import connect_all


class PeerMonitor:
    """An idle TCP connection to each other rank.

    Parameters
    ----------
    store
        A store that all ranks share, under a prefix that nothing else uses.
    address
        The address at which this process listens for the others.
    rank, size
        This process's rank, and the number of ranks.
    timeout
        Seconds that connecting may take.

    Raises
    ------
    OSError, RuntimeError
        When some rank does not connect within the timeout.
    """

    def __init__(self, store: Store, address: str, rank: int, size: int, timeout: float) -> None:
        self._peers: dict[int, tuple[int, socket.socket]] = {}
        self._poll = select.poll()
        for peer, connection in enumerate(connect_all(store, address, rank, size, timeout)):
            if connection is not None:
                self._peers[connection.fileno()] = peer, connection
                # No rank ever writes, so a connection is readable only once it is closed.
                self._poll.register(connection, select.POLLIN)

    def dead_peer(self) -> int | None:
        """Return a rank whose connection is closed, or None; only one thread at a time may call."""
        closed = self._poll.poll(0)
        return self._peers[closed[0][0]][0] if closed else None

    def close(self) -> None:
        """Close all connections, so that peers consider this rank dead; any thread may call."""
        for _, connection in self._peers.values():
            with suppress(OSError):  # the peer closed first
                connection.shutdown(socket.SHUT_RDWR)
