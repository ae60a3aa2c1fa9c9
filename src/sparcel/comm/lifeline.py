"""Connections that carry nothing and end with their process, since MPI does not tell of ends."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from sparcel.comm.sockets import connect_all


class Lifeline:
    """A TCP connection to each other rank.

    Parameters
    ----------
    store
        Where the ranks meet; all give the same, under a prefix used by no one else.
    rank, size
        This process's rank, and how many there are.
    timeout
        Seconds that connecting may take.

    Raises
    ------
    OSError, RuntimeError
        When not all ranks connected within the timeout.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._peers: dict[int, tuple[int, socket.socket]] = {}
        self._poll = select.poll()
        for peer, connection in enumerate(connect_all(store, rank, size, timeout)):
            if connection is not None:
                self._peers[connection.fileno()] = peer, connection
                self._poll.register(connection, select.POLLIN)  # what there is to read is its end

    def ended(self) -> int | None:
        """Return a rank whose connection has ended, or None; from one thread at a time."""
        ends = self._poll.poll(0)
        return self._peers[ends[0][0]][0] if ends else None

    def end(self) -> None:
        """End all connections, from any thread."""
        for _, connection in self._peers.values():
            with suppress(OSError):  # the peer was first
                connection.shutdown(socket.SHUT_RDWR)
