"""Connects every rank to every other; a store holds the addresses of the ranks.

Connections are TCP. On Linux, ranks with one address use Unix sockets instead, which take the
kernel less time for each byte, where these work.

Two ranks prove to each other that they belong to one group. The rank that dials sends its number
and a nonce. The rank that listens answers with a nonce of its own and a proof; the first rank then
sends its proof. A proof is an HMAC, under the group's key, of the role, both ranks and both nonces.
So the key itself never travels, a proof is of no use on another connection, and none can be sent
back as an answer.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import platform
import selectors
import socket
import struct
import sys
import time
from collections.abc import Collection, Generator
from contextlib import ExitStack, closing, suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

_KEY = "key"

Address = tuple[str, int]


class UnreachedError(ConnectionError):
    """Some ranks were not reached.

    Parameters
    ----------
    text
        What has happened.
    peers
        The ranks.
    """

    def __init__(self, text: str, peers: list[int]) -> None:
        super().__init__(text)
        self.peers = peers


_STRANGERS = 128
"""How many connections may be open at once that have not proven to be a rank."""

_PAUSE_SECONDS = 0.01
"""How long a rank waits before it dials again."""

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
"""The errors of a process, or of a machine, that has as many open files as it may have."""


def connect_all(store: Store, address: str, rank: int, size: int, timeout: float) -> list[int]:
    """Return the descriptor of a connected socket for every other rank, by rank; −1 for this one.

    Every rank listens at its ``address`` for the higher ranks and dials the lower ones. Both ends
    of a connection prove that they know the group's key, which is in the store until all ranks have
    read it. If so many strangers connect that a rank's connection is closed before that, the rank
    dials again.

    Raises
    ------
    OSError, RuntimeError
        The socket's error, or the store's, when not all ranks connected within the timeout.
    """
    if size == 1:
        return [-1]
    deadline = time.monotonic() + timeout
    if rank == 0:
        store.set(_KEY, os.urandom(KEY_BYTES).hex())
    key = bytes.fromhex(_read(store, _KEY, deadline))
    meeting = _Meeting(address, key, rank, size, deadline)
    try:
        store.set(f"address{rank}", " ".join(map(str, meeting.address)))
        for peer in range(rank):
            host, port = _read(store, f"address{peer}", deadline).split()
            meeting.dial(peer, (host, int(port)))
        meeting.wait()
        if rank == 0:  # the others have proven to this rank that they have read the key
            store.delete_key(_KEY)
    except BaseException:
        for connection in meeting.connected.values():
            connection.close()
        raise
    finally:
        meeting.close()
    for connection in meeting.connected.values():
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sockets = [meeting.connected.get(peer) for peer in range(size)]
    return [-1 if peer is None else peer.detach() for peer in sockets]


class _Meeting:
    """One rank's connections to the others, while they greet each other side by side.

    Attributes
    ----------
    address
        Host and port that the higher ranks dial.
    connected
        The connections to ranks that have proven themselves, by rank.
    """

    def __init__(self, address: str, key: bytes, rank: int, size: int, deadline: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        most = size + _STRANGERS
        listener = socket.create_server((address, 0), family=family, backlog=most)
        self.address: Address = listener.getsockname()[:2]
        self._listeners = [listener]
        unix = _unix_socket(_unix_name(key, self.address), most)
        if unix is not None:
            self._listeners.append(unix)
        self.connected: dict[int, socket.socket] = {}
        self._key, self._rank, self._most, self._deadline = key, rank, most, deadline
        self._dialled: dict[int, Address] = {}
        self._dropped: list[int] = []
        self._expected = set(range(size)) - {rank}
        # Each greeting with the rank that this one dialled, or None; the oldest first.
        self._greetings: dict[socket.socket, tuple[Greeting, int | None]] = {}
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def dial(self, peer: int, address: Address) -> None:
        """Connect to a lower rank, and begin to greet it."""
        self._dialled[peer] = address
        connection = None
        if address[0] == self.address[0]:
            connection = _unix_socket(_unix_name(self._key, address))
        if connection is None:
            try:
                connection = socket.create_connection(address, timeout=_left(self._deadline))
            except OSError as error:
                host, port = address
                text = f"rank {peer} of the group cannot be reached at {host}:{port}: {error}"
                raise UnreachedError(text, [peer]) from error
        self._begin(connection, greet(connection, self._key, self._rank, peer), peer)

    def wait(self) -> None:
        """Wait until all ranks have proven themselves."""
        while self._expected:
            ready = self._selector.select(0 if self._dropped else _left(self._deadline))
            if time.monotonic() >= self._deadline:
                peers = sorted(self._expected)
                raise UnreachedError(f"timed out without ranks {peers} of the group", peers)
            for connection in [entry.fileobj for entry, _ in ready]:
                assert isinstance(connection, socket.socket)
                if connection in self._listeners:
                    self._accept(connection)
                elif connection in self._greetings:
                    self._go_on(connection)
            dropped, self._dropped = self._dropped, []
            for peer in dropped:
                time.sleep(_PAUSE_SECONDS)
                self.dial(peer, self._dialled[peer])

    def close(self) -> None:
        """Close the listening socket and the connections that were not greeted to the end."""
        for connection in (*self._listeners, *self._greetings):
            connection.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        """Begin to greet whoever connected; strangers must not keep out ranks by their number."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # the other end has gone
            return
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR or not self._drop_oldest():
                raise
            return  # whoever waits is accepted next
        self._begin(connection, welcome(connection, self._key, self._rank, self._expected), None)
        if len(self._greetings) > self._most:
            self._drop_oldest()

    def _begin(self, connection: socket.socket, greeting: Greeting, peer: int | None) -> None:
        connection.setblocking(False)
        self._greetings[connection] = greeting, peer
        self._selector.register(connection, selectors.EVENT_READ)
        self._go_on(connection)

    def _go_on(self, connection: socket.socket) -> None:
        """Let a greeting go on until it waits for bytes, or ends."""
        greeting, dialled = self._greetings[connection]
        try:
            next(greeting)
        except StopIteration as end:
            self._selector.unregister(connection)
            del self._greetings[connection]
            self._expected.remove(end.value)
            self.connected[end.value] = connection
        except OSError as error:
            self._drop(connection)
            if dialled is None:
                return
            if isinstance(error, StrangerError):
                text = f"rank {dialled} did not greet: {error}"
                raise UnreachedError(text, [dialled]) from error
            self._dropped.append(dialled)

    def _drop_oldest(self) -> bool:
        """Drop the oldest connection that has not proven to be a rank; return whether one was."""
        accepted = (one for one, (_, dialled) in self._greetings.items() if dialled is None)
        oldest = next(accepted, None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._greetings[connection]
        connection.close()


def _unix_name(key: bytes, address: Address) -> str:
    """Return the name at which a rank listens for those of its machine.

    Such names ("abstract") are no files; they belong to the network namespace, as addresses do.
    Only ranks can know one before it is taken, so nobody else takes it first. Once it is taken,
    every user of the machine can read it in ``/proc/net/unix`` and dial it, as well as the port:
    the ends of a connection trust each other's proof alone.
    """
    host, port = address
    return "\0" + hmac.digest(key, f"{host} {port}".encode(), "sha256").hex()


def _unix_socket(name: str, backlog: int | None = None) -> socket.socket | None:
    """Connect to a Unix socket of this name, or listen there; return None if only TCP works.

    Namespaces may have equal addresses, so that the name is not there; the other end's queue may be
    full; sandboxes forbid such sockets, or some of their calls.
    """
    if sys.platform != "linux":
        return None
    with suppress(OSError), ExitStack() as unless_done:
        unix = unless_done.enter_context(socket.socket(socket.AF_UNIX))
        if backlog is None:
            unix.setblocking(False)  # there is nothing to wait for but a place in a full queue
            unix.connect(name)
        else:
            unix.bind(name)
            unix.listen(backlog)
        unless_done.pop_all()
        return unix
    return None


def _read(store: Store, key: str, deadline: float) -> str:
    store.wait([key], timedelta(seconds=_left(deadline)))
    value: bytes = store.get(key)
    return value.decode()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


Greeting = Generator[None, None, int]
"""Yields whenever it waits for bytes, so that the greetings of many connections can be awaited side
by side, and returns the peer's rank."""

KEY_BYTES = 32

_NONCE_BYTES = _PROOF_BYTES = 32

_HELLO = struct.Struct(f"<I{_NONCE_BYTES}s")
"""What the rank that dials sends first: its number and its nonce."""

_ANSWER = struct.Struct(f"{_NONCE_BYTES}s{_PROOF_BYTES}s")
"""What the rank that listens answers: its nonce and its proof."""

_PROVEN = struct.Struct(f"<8sII{_NONCE_BYTES}s{_NONCE_BYTES}s")
"""What a proof covers: the prover's role, the ranks and the nonces, those of the dialling first."""


class StrangerError(ConnectionError):
    """The other end of a connection does not prove to be a rank that is expected."""


def greet(connection: socket.socket, key: bytes, me: int, peer: int) -> Greeting:
    """Greet as rank ``me``, which dialled rank ``peer``."""
    mine = os.urandom(_NONCE_BYTES)
    connection.sendall(_HELLO.pack(me, mine))
    theirs, proof = _ANSWER.unpack((yield from _receive(connection, _ANSWER.size)))
    _check(proof, key, b"listens", me, peer, mine, theirs)
    connection.sendall(_proof(key, b"dials", me, peer, mine, theirs))
    return peer


def welcome(connection: socket.socket, key: bytes, me: int, expected: Collection[int]) -> Greeting:
    """Greet as rank ``me``, which was dialled; the peer must be expected, and above ``me``.

    Each rank dials those below it.
    """
    peer, theirs = _HELLO.unpack((yield from _receive(connection, _HELLO.size)))
    if peer not in expected or peer <= me:
        raise StrangerError(f"rank {peer} is not expected")
    mine = os.urandom(_NONCE_BYTES)
    answer = _ANSWER.pack(mine, _proof(key, b"listens", peer, me, theirs, mine))
    connection.sendall(answer)
    proof = yield from _receive(connection, _PROOF_BYTES)
    _check(proof, key, b"dials", peer, me, theirs, mine)
    if peer not in expected:
        raise StrangerError(f"another connection has proven to be rank {peer} meanwhile")
    return int(peer)


def _receive(connection: socket.socket, nbytes: int) -> Generator[None, None, bytes]:
    """Read exactly ``nbytes``, because a peer's first message may follow them at once."""
    came = b""
    while len(came) < nbytes:
        try:
            more = connection.recv(nbytes - len(came))
        except BlockingIOError:
            yield
            continue
        if not more:
            raise ConnectionResetError("the other end closed the connection during the greeting")
        came += more
    return came


def _proof(key: bytes, role: bytes, *proven: int | bytes) -> bytes:
    return hmac.digest(key, _PROVEN.pack(role, *proven), "sha256")


def _check(proof: bytes, key: bytes, role: bytes, *proven: int | bytes) -> None:
    if not hmac.compare_digest(proof, _proof(key, role, *proven)):
        raise StrangerError("the other end does not know the group's key")


LOOPBACK = "127.0.0.1"

_INTERFACE_ADDRESS = {"Linux": 0x8915, "Darwin": 0xC0206921}
"""The ioctl that returns an interface's IPv4 address (SIOCGIFADDR)."""


def gloo_address() -> str:
    """Return the address at which torch's Gloo listens in this process.

    That is the address of the interface in ``GLOO_SOCKET_IFNAME``. Without the variable, it is the
    first address of the hostname that this machine has, and loopback if there is none.
    """
    return address_of_interface() or _address_of_hostname() or LOOPBACK


def address_of_interface() -> str | None:
    """Return the IPv4 address of the interface in ``GLOO_SOCKET_IFNAME``, if there is one.

    The variable may list several interfaces, separated by commas; the first one counts.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    request = struct.pack("256s", interface.encode()[:15])
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe, _INTERFACE_ADDRESS[platform.system()], request)
        return socket.inet_ntoa(answer[20:24])
    return None


def _address_of_hostname() -> str | None:
    with suppress(OSError):  # the hostname has no address
        kind = socket.SOCK_STREAM
        for family, _, _, _, there in socket.getaddrinfo(socket.gethostname(), 0, type=kind):
            with suppress(OSError), closing(socket.socket(family, kind)) as probe:
                probe.bind(there)
                return str(there[0])
    return None


def address_towards(host: str) -> str:
    """Return the source address of packets that this machine sends to a host.

    Raises
    ------
    OSError
        When there is no route to the host.
    """
    any_port = 9
    family, kind, protocol, _, there = socket.getaddrinfo(host, any_port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(there)  # connecting a datagram socket sends nothing
        own: str = probe.getsockname()[0]
        return own
