"""Connects every rank to every other over TCP; a store holds the addresses of the ranks."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import time
from contextlib import closing, suppress
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed.distributed_c10d import PrefixStore, Store

_GREETING = struct.Struct("<16sI")
"""The first bytes on a connection: the group's cookie and the rank that connects."""

_GREETING_SECONDS = 2.0
"""How long to wait for the greeting of a new connection; ranks send it at once."""

_INTERFACE_ADDRESS = {"Linux": 0x8915, "Darwin": 0xC0206921}
"""The ioctl that returns an interface's IPv4 address (SIOCGIFADDR)."""

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no machine (RFC 5737, RFC 3849); the route to them leads off this machine."""

_LOOPBACK = "127.0.0.1"


def connect_all(store: Store, rank: int, size: int, timeout: float) -> list[socket.socket | None]:
    """Return a connected socket for every other rank, by rank, and None for this one.

    Every rank listens for the higher ranks and connects to the lower ones.

    Raises
    ------
    OSError, RuntimeError
        The socket's error, or the store's, when not all ranks connected within the timeout.
    """
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
    except BaseException:
        for connected in sockets:
            if connected is not None:
                connected.close()
        raise
    for connected in sockets:
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def _listen(store: Store, size: int) -> socket.socket:
    """Return a socket that listens at an address which the other ranks can reach."""
    address = own_address(store)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=size)


def own_address(store: Store | None = None) -> str:
    """Return an address at which other ranks can reach this process.

    The interface in ``GLOO_SOCKET_IFNAME`` takes precedence, then the interface on the route to
    the store. Other machines cannot use a loopback address; if the store is on this machine, the
    interface of the default route is used instead, and loopback only if there is no such route.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with suppress(OSError):  # the interface has no IPv4 address
            return _address_of(interface)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)  # only a TCPStore has a host
    for target in (*([host] if host else []), *_ELSEWHERE):
        with suppress(OSError):
            address = _address_towards(target)
            if not is_loopback(address):
                return address
    return _LOOPBACK


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    return ip_address(address).is_loopback


def _address_of(interface: str) -> str:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe, _INTERFACE_ADDRESS[platform.system()], request)
        return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> str:
    """Return the source address of packets that this machine would send to a host."""
    any_port = 9
    family, kind, protocol, _, there = socket.getaddrinfo(host, any_port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(there)  # connecting a datagram socket sends nothing
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
    """Wait for the next rank to connect; close connections that do not send the cookie."""
    while True:
        listener.settimeout(_left(deadline))
        connection, _ = listener.accept()
        with suppress(OSError):  # the other side closed, or sends nothing
            known, rank = _greeting(connection, deadline)
            if known == cookie:
                return rank, connection
        connection.close()


def _greeting(connection: socket.socket, deadline: float) -> tuple[bytes, int]:
    """Read the cookie and the rank from a new connection; raises `OSError`."""
    deadline = min(deadline, time.monotonic() + _GREETING_SECONDS)
    greeting = b""
    while len(greeting) < _GREETING.size:
        connection.settimeout(_left(deadline))
        came = connection.recv(_GREETING.size - len(greeting))
        if not came:
            raise ConnectionError("the connection closed before it sent its greeting")
        greeting += came
    cookie, rank = _GREETING.unpack(greeting)
    return cookie, rank


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
