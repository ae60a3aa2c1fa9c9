"""Who may connect: ranks that prove to know the group's key, each once, and nobody else."""

from __future__ import annotations

import errno
import gc
import os
import resource
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count, islice

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sparcel.core.comm import sockets
from sparcel.core.comm.connected import connecting
from sparcel.core.comm.sockets import StrangerError, greet, welcome
from sparcel.errors import CommunicationError

LOOPBACK, SECONDS = "127.0.0.1", 60.0
HELLO_BYTES, ANSWER_BYTES, PROOF_BYTES = 36, 64, 32

Dial = Callable[[], socket.socket]


def hello(rank: int) -> bytes:
    return struct.pack("<I32s", rank, bytes(32))


def key_in(store: dist.Store) -> bytes:
    return bytes.fromhex(store.get("key").decode())


def finish(greeting: Iterator[None]) -> None:
    """Run a greeting over a socket that blocks."""
    for _ in greeting:
        raise AssertionError("a socket that blocks never makes a greeting wait")


def connect_with(
    store: dist.Store, intrude: Callable[[Dial], object]
) -> tuple[socket.socket, socket.socket]:
    """Connect two ranks, and call a function when rank 0 listens and before rank 1 comes."""
    connected: dict[int, socket.socket] = {}

    def join(rank: int) -> None:
        descriptor = sockets.connect_all(store, LOOPBACK, rank, 2, SECONDS)[1 - rank]
        connected[rank] = socket.socket(fileno=descriptor)

    first = threading.Thread(target=join, args=(0,))
    first.start()
    kept = intrude(dials(store))
    join(1)
    first.join()
    del kept
    return connected[0], connected[1]


def dials(store: dist.Store) -> Dial:
    """Return a function that connects to rank 0, which has begun to connect."""
    store.wait(["address0"], timedelta(seconds=SECONDS))
    host, port = store.get("address0").decode().split()
    return lambda: socket.create_connection((host, int(port)))


def check_and_close(one: socket.socket, other: socket.socket) -> None:
    for here, there in ((one, other), (other, one)):
        here.sendall(b"hello")
        assert there.recv(5) == b"hello"
    one.close()
    other.close()


def say(dial: Dial, words: bytes) -> socket.socket:
    stranger = dial()
    stranger.sendall(words)
    return stranger


def silent(dial: Dial, store: dist.Store) -> object:
    return [dial() for _ in range(30)]


def gone(dial: Dial, store: dist.Store) -> object:
    say(dial, b"G").close()
    return None


def garbage(dial: Dial, store: dist.Store) -> object:
    return [say(dial, b"G"), say(dial, b"GET / HTTP/1.0\r\n\r\n" * 10)]


def unknown_rank(dial: Dial, store: dist.Store) -> object:
    return [say(dial, hello(rank)) for rank in (77, 2, 0, 2**32 - 1)]


def without_the_key(dial: Dial, store: dist.Store) -> object:
    strangers = [say(dial, hello(1)) for _ in range(3)]
    strangers[-1].recv(ANSWER_BYTES)
    strangers[-1].sendall(bytes(PROOF_BYTES))
    assert strangers[-1].recv(1) == b""
    with pytest.raises(StrangerError, match="does not know the group's key"):
        finish(greet(dial(), bytes(32), 1, 0))
    return strangers


def reflected(dial: Dial, store: dist.Store) -> object:
    """Send rank 0's own proof back."""
    stranger = say(dial, hello(1))
    stranger.sendall(stranger.recv(ANSWER_BYTES)[-PROOF_BYTES:])
    assert stranger.recv(1) == b""
    return stranger


def replayed(dial: Dial, store: dist.Store) -> object:
    """Say what rank 1 once said to a rank that has the same key."""
    theirs, ours = socket.socketpair()
    listens = threading.Thread(target=finish, args=(welcome(ours, key_in(store), 0, {1}),))
    recorded = Recorder(theirs)
    listens.start()
    finish(greet(recorded, key_in(store), 1, 0))
    listens.join()
    stranger = say(dial, bytes(recorded.sent[:HELLO_BYTES]))
    stranger.recv(ANSWER_BYTES)
    stranger.sendall(recorded.sent[HELLO_BYTES:])
    assert stranger.recv(1) == b""
    return stranger


class Recorder(socket.socket):
    """A socket that keeps what it sends."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(fileno=connection.detach())
        self.sent = bytearray()

    def sendall(self, words: bytes) -> None:  # type: ignore[override]
        self.sent += words
        super().sendall(words)


@pytest.mark.parametrize(
    "intrude",
    [silent, gone, garbage, unknown_rank, without_the_key, reflected, replayed],
)
def test_strangers_neither_get_in_nor_keep_a_rank_out(
    intrude: Callable[[Dial, dist.Store], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_STRANGERS", 20)
    store = dist.HashStore()
    check_and_close(*connect_with(store, lambda dial: intrude(dial, store)))


@given(free=st.integers(1, 6), strangers=st.integers(0, 12))
def test_strangers_do_not_keep_a_rank_out_by_taking_all_descriptors(
    free: int, strangers: int
) -> None:
    """Rank 0 may open ``free`` files; ``strangers`` connect to it and say nothing."""
    store, joined = dist.HashStore(), list[int]()
    listens = threading.Thread(
        target=lambda: joined.extend(sockets.connect_all(store, LOOPBACK, 0, 2, SECONDS))
    )
    dialling = [socket.socket() for _ in range(strangers + 1)]
    listens.start()
    there = dials(store)().getpeername()
    with open_files_at_most(free):
        for stranger in dialling[:-1]:
            stranger.connect(there)
        rank = dialling[-1]
        rank.connect(there)
        finish(greet(rank, key_in(store), 1, 0))
        listens.join()
    check_and_close(rank, socket.socket(fileno=joined[1]))
    for stranger in dialling[:-1]:
        stranger.close()


@contextmanager
def open_files_at_most(more: int) -> Iterator[None]:
    """Let this process open only so many files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    numbers = (number for number in count() if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(numbers, more - 1, None)) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_gets_in_once() -> None:
    store, connected = dist.HashStore(), list[list[int]]()
    join = (store, LOOPBACK, 0, 3, SECONDS)
    listens = threading.Thread(target=lambda: connected.append(sockets.connect_all(*join)))
    listens.start()
    dial = dials(store)
    key = key_in(store)
    first, again, other = dial(), dial(), dial()
    finish(greet(first, key, 1, 0))
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        finish(greet(again, key, 1, 0))
    finish(greet(other, key, 2, 0))
    listens.join()
    for ours, theirs in zip((first, other), connected[0][1:], strict=True):
        check_and_close(ours, socket.socket(fileno=theirs))
    again.close()


def test_of_two_greetings_under_way_the_first_to_end_gets_in() -> None:
    key, due = bytes(32), {1}
    ends = [socket.socketpair() for _ in range(2)]
    for pair in ends:
        for end in pair:
            end.setblocking(False)
    dialling = [greet(theirs, key, 1, 0) for theirs, _ in ends]
    listening = [welcome(ours, key, 0, due) for _, ours in ends]
    for greeting in (*dialling, *listening):
        next(greeting)
    for greeting in dialling:
        with pytest.raises(StopIteration, match="0"):
            next(greeting)
    with pytest.raises(StopIteration, match="1"):
        next(listening[1])
    due.remove(1)
    with pytest.raises(StrangerError, match="another connection has proven to be rank 1"):
        next(listening[0])
    for pair in ends:
        for end in pair:
            end.close()


def test_the_key_is_gone_once_all_are_connected() -> None:
    store = dist.HashStore()
    check_and_close(*connect_with(store, lambda _: store.get("key")))
    assert not store.check(["key"])


def test_a_rank_refuses_a_listener_that_does_not_know_the_key() -> None:
    store = dist.HashStore()
    store.set("key", "00" * 32)
    with socket.create_server((LOOPBACK, 0)) as impostor:
        store.set("address0", f"{LOOPBACK} {impostor.getsockname()[1]}")

        def answer() -> None:
            connection, _ = impostor.accept()
            connection.recv(HELLO_BYTES)
            connection.sendall(bytes(ANSWER_BYTES))
            connection.recv(1)
            connection.close()

        listens = threading.Thread(target=answer)
        listens.start()
        with pytest.raises(ConnectionError, match=r"rank 0 did not greet: .* the group's key"):
            sockets.connect_all(store, LOOPBACK, 1, 2, SECONDS)
        listens.join()


def test_a_rank_that_is_dropped_dials_again() -> None:
    """The listener greets the third connection; it ends the first at once, the second halfway."""
    store = dist.HashStore()
    store.set("key", "00" * 32)
    joined = list[int]()
    with socket.create_server((LOOPBACK, 0)) as listener:
        store.set("address0", f"{LOOPBACK} {listener.getsockname()[1]}")
        join = (store, LOOPBACK, 1, 2, SECONDS)
        dials = threading.Thread(target=lambda: joined.extend(sockets.connect_all(*join)))
        dials.start()
        listener.accept()[0].close()
        halfway, _ = listener.accept()
        halfway.recv(1)
        halfway.close()
        connection, _ = listener.accept()
        finish(welcome(connection, bytes(32), 0, {1}))
        dials.join()
    check_and_close(connection, socket.socket(fileno=joined[0]))


def test_a_failed_connection_is_explained_in_one_sentence() -> None:
    store = dist.HashStore()
    store.set("key", "00" * 32)
    with socket.create_server((LOOPBACK, 0)) as gone:
        store.set("address0", f"{LOOPBACK} {gone.getsockname()[1]}")
    for rank, why in ((1, "refused"), (0, "timed out")):
        with pytest.raises(CommunicationError) as caught, connecting(rank, [0, 1]):
            sockets.connect_all(store, LOOPBACK, rank, 2, 0.2)
        assert str(caught.value).startswith(f"rank {rank} could not connect to ranks [{1 - rank}],")
        assert why in str(caught.value)


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names that are no files")


@linux
@pytest.mark.parametrize("namespace", ["the same", "another"])
def test_ranks_of_one_machine_connect_by_unix_sockets(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines, or containers, may have equal addresses; then the name is not there."""
    near = sockets._unix_socket

    def elsewhere(name: str, backlog: int | None = None) -> socket.socket | None:
        return near(f"{name}!" if backlog else name, backlog)

    if namespace == "another":
        monkeypatch.setattr(sockets, "_unix_socket", elsewhere)
    one, other = connect_with(dist.HashStore(), lambda dial: None)
    expected = socket.AF_UNIX if namespace == "the same" else socket.AF_INET
    assert one.family == other.family == expected
    check_and_close(one, other)


class Sandboxed(socket.socket):
    """A socket of a process that may not use Unix sockets, or not all of their calls."""

    forbidden = ""

    def __init__(self, family: int = -1, *rest: object, **named: object) -> None:
        if family == socket.AF_UNIX:
            self.refuse("socket")
        super().__init__(family, *rest, **named)  # type: ignore[arg-type]

    def refuse(self, call: str) -> None:
        if call == self.forbidden:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    def bind(self, address: object) -> None:
        if self.family == socket.AF_UNIX:
            self.refuse("bind")
        super().bind(address)  # type: ignore[arg-type]

    def connect(self, address: object) -> None:
        if self.family == socket.AF_UNIX:
            self.refuse("connect")
        super().connect(address)  # type: ignore[arg-type]


@linux
@pytest.mark.parametrize("forbidden", ["socket", "bind", "connect"])
@pytest.mark.filterwarnings("error")  # a socket that is not closed warns
def test_where_unix_sockets_are_forbidden_ranks_connect_over_tcp(
    forbidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sandboxed, "forbidden", forbidden)
    monkeypatch.setattr(socket, "socket", Sandboxed)
    one, other = connect_with(dist.HashStore(), lambda dial: None)
    assert one.family == other.family == socket.AF_INET
    check_and_close(one, other)
    gc.collect()


@linux
def test_where_the_queue_of_a_unix_socket_is_full_ranks_connect_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, held = sockets._unix_socket, list[socket.socket]()

    def listen(name: str, backlog: int | None = None) -> socket.socket | None:
        """Listen at the rank's name with a full queue, and give the rank another listener."""
        if backlog is None:
            return near(name)
        full, other = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        full.bind(name)
        full.listen(0)
        other.bind("")  # any name
        other.listen(0)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(name)
        held.extend((full, waiting))
        return other

    monkeypatch.setattr(sockets, "_unix_socket", listen)
    one, other = connect_with(dist.HashStore(), lambda dial: None)
    assert one.family == other.family == socket.AF_INET
    check_and_close(one, other)
    for one in held:
        one.close()
