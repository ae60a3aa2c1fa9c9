"""Messages of any size over TCP connections of our own, one to each peer.

What Gloo takes for a point-to-point message, three packets and the wake-ups of two threads at
either end, is most of what a small exchange costs. Here a message is its length and its bytes, and
the thread that waits for it reads it from the socket.
"""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from sparcel import _cpu
from sparcel.comm.engine import LostPeerError
from sparcel.errors import CommunicationError, MismatchError

_GREETING = struct.Struct("<16sI")
"""What a connection begins with: the group's cookie and the rank that connects."""

_INTERFACE_ADDRESS = {"Linux": 0x8915, "Darwin": 0xC0206921}
"""The ioctl that tells an interface's IPv4 address (SIOCGIFADDR)."""


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
    CommunicationError
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
        addresses = [
            (peer, [(part.data_ptr(), part.numel()) for part in parts])
            for peer, parts in sends.items()
        ]
        arrived, fault, peer, length = self._mesh.exchange(
            addresses, list(receives.items()), self.timeout
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
        me, whom = self.names[self.rank], f"rank {self.names[peer]}"
        if fault == _TOO_LONG:
            raise MismatchError(
                f"{whom} sent {length} bytes to rank {me}, which expected at most {at_most}; the"
                " ranks' sizes, dtypes or counts differ"
            )
        if fault == _LATE:
            raise LostPeerError(f"rank {me} waited {self.timeout:g} s for {whom}", late=True)
        text = f"rank {me} lost its connection to {whom}, whose process or network failed"
        raise LostPeerError(text, late=False)


_LOST, _LATE, _TOO_LONG = 1, 2, 3
"""How an exchange fails; `csrc/mesh.hpp` numbers them."""


def connect_all(store: Store, rank: int, size: int, timeout: float) -> list[socket.socket | None]:
    """Return a connected socket for every other rank: lower ranks listen to higher ones."""
    deadline = time.monotonic() + timeout
    if rank == 0:
        store.set("cookie", os.urandom(16).hex())
    sockets: list[socket.socket | None] = [None] * size
    try:
        with closing(_listen(store, size)) as listener:
            host, port = listener.getsockname()[:2]
            store.set(f"address{rank}", f"{host} {port}")
            cookie = bytes.fromhex(_read(store, "cookie", deadline))
            for peer in range(rank):
                host, port = _read(store, f"address{peer}", deadline).split()
                sockets[peer] = _dial(host, int(port), cookie, rank, deadline)
            for _ in range(rank + 1, size):
                peer, connection = _accept(listener, cookie, deadline)
                sockets[peer] = connection
    except OSError as error:
        for connected in sockets:
            if connected is not None:
                connected.close()
        raise CommunicationError(f"no connection: {error}") from error
    for connected in sockets:
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def _listen(store: Store, size: int) -> socket.socket:
    """Listen where the other ranks reach this one."""
    try:
        address = own_address(store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=size)
    except OSError:  # such as a host name that means no address of this machine
        return socket.create_server(("127.0.0.1", 0), backlog=size)


def own_address(store: Store | None = None) -> str:
    """Return the address of the interface that Gloo is told to use, or that leads to the store."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe, _INTERFACE_ADDRESS[platform.system()], request)
            return socket.inet_ntoa(answer[20:24])
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host is None:  # only a TCPStore is somewhere
        return socket.gethostbyname(socket.gethostname())
    kinds = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = kinds[0]
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own


def _read(store: Store, key: str, deadline: float) -> str:
    store.wait([key], timedelta(seconds=_left(deadline)))
    value: bytes = store.get(key)
    return value.decode()


def _dial(host: str, port: int, cookie: bytes, rank: int, deadline: float) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_left(deadline))
    connection.sendall(_GREETING.pack(cookie, rank))
    return connection


def _accept(listener: socket.socket, cookie: bytes, deadline: float) -> tuple[int, socket.socket]:
    """Wait for the next rank that connects; who does not know the cookie is turned away."""
    while True:
        listener.settimeout(_left(deadline))
        connection, _ = listener.accept()
        connection.settimeout(_left(deadline))
        greeting = b""
        with suppress(ConnectionError):
            while len(greeting) < _GREETING.size and (
                came := connection.recv(_GREETING.size - len(greeting))
            ):
                greeting += came
        if len(greeting) == _GREETING.size:
            known, rank = _GREETING.unpack(greeting)
            if known == cookie:
                return rank, connection
        connection.close()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
