"""Connections between ranks: the addresses that they give, and the peers that they refuse."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from sparcel.comm import sockets
from sparcel.comm.rendezvous import connecting
from sparcel.errors import CommunicationError


class Somewhere(dist.HashStore):
    """A store that tells its address, as a TCPStore does."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self.host = host


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Maps hosts to the local address of a route to them; other hosts are unreachable."""
    known: dict[str, str] = {}

    def address_towards(host: str) -> str:
        if host not in known:
            raise OSError("unreachable")
        return known[host]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(sockets, "_address_towards", address_towards)
    return known


WAY_OUT = "192.0.2.1"


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ({"head": "10.0.0.2", WAY_OUT: "10.1.0.2"}, "10.0.0.2"),
        ({"head": "127.0.0.1", WAY_OUT: "10.1.0.2"}, "10.1.0.2"),  # the store is on this machine
        ({"head": "127.0.1.1", "2001:db8::1": "fd00::2"}, "fd00::2"),
        ({WAY_OUT: "10.1.0.2"}, "10.1.0.2"),  # the store's name cannot be resolved here
        ({"head": "127.0.0.1"}, "127.0.0.1"),
        ({}, "127.0.0.1"),
    ],
)
def test_loopback_is_given_only_without_another_address(
    routes: dict[str, str], ways: dict[str, str], expected: str
) -> None:
    routes.update(ways)
    store = Somewhere("head")
    within = dist.PrefixStore("a", dist.PrefixStore("b", store))
    assert sockets.own_address(within) == expected


def test_the_interface_of_gloo_is_used(
    routes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    routes.update({WAY_OUT: "10.1.0.2"})
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{loopback},other")
    assert sockets.own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert sockets.own_address() == "10.1.0.2"


def on_two_ranks(store: dist.Store, before: Callable[[str, int], Any]) -> list[Any]:
    """Connect two ranks; ``before`` gets the first one's address before the second one connects."""
    connected: list[Any] = [None, None]

    def connect(rank: int) -> None:
        connected[rank] = sockets.connect_all(store, rank, 2, 60.0)[1 - rank]

    first = threading.Thread(target=connect, args=(0,))
    first.start()
    store.wait(["address0"], timedelta(seconds=60))
    host, port = store.get("address0").decode().split()
    kept = before(host, int(port))
    connect(1)
    first.join()
    del kept
    return connected


@pytest.mark.parametrize("says", [b"", b"G", b"GET / HTTP/1.0\r\n\r\n and more"])
@pytest.mark.parametrize("goes", [True, False])
def test_peers_that_are_no_ranks_are_refused(
    says: bytes, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_GREETING_SECONDS", 0.2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def intrude(host: str, port: int) -> socket.socket:
        stranger = socket.create_connection((host, port))
        stranger.sendall(says)
        if goes:
            stranger.close()
        return stranger

    start = time.monotonic()
    one, other = on_two_ranks(dist.HashStore(), intrude)
    assert time.monotonic() - start < 30
    one.sendall(b"hello")
    assert other.recv(5) == b"hello"
    one.close()
    other.close()


def test_a_failed_connection_is_explained_in_one_sentence() -> None:
    store = dist.HashStore()
    store.set("cookie", "00" * 16)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        store.set("address0", f"127.0.0.1 {gone.getsockname()[1]}")
    for rank, why in ((1, "refused"), (0, "timed out")):
        with pytest.raises(CommunicationError) as caught, connecting(rank, [0, 1]):
            sockets.connect_all(store, rank, 2, 0.2)
        assert str(caught.value).startswith(f"rank {rank} could not connect to ranks [{1 - rank}],")
        assert why in str(caught.value)
