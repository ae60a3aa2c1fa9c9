"""The address at which a rank listens is the one that Gloo listens at."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sparcel.core.comm.sockets import gloo_address

_LISTENING = "0A"


def resolving_to(*addresses: str) -> Any:
    """Return a replacement for `socket.getaddrinfo` that finds these IPv4 addresses."""

    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror("the name is not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]

    return getaddrinfo


@pytest.mark.parametrize(
    ("interface", "addresses", "expected"),
    [
        ("lo,other", ["127.0.0.2"], "127.0.0.1"),
        ("", ["127.0.0.2", "127.0.0.3"], "127.0.0.2"),
        ("", ["192.0.2.1", "127.0.0.3"], "127.0.0.3"),  # another machine has the first one
        ("", [], "127.0.0.1"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine's")
def test_the_interface_comes_before_the_hostname_and_loopback_last(
    interface: str, addresses: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "getaddrinfo", resolving_to(*addresses))
    assert gloo_address() == expected


def listening() -> set[str]:
    """Return the inodes and IPv4 addresses of this process's listening sockets."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        inode = f"socket:[{rest[5]}]"
        if state == _LISTENING and inode in own:
            address = bytes.fromhex(local.partition(":")[0])[::-1]
            found.add(f"{inode} {socket.inet_ntoa(address)}")
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("interface", ["lo", None])
def test_gloo_itself_listens_there(interface: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    before = listening()
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    (new,) = listening() - before
    assert new.split()[1] == gloo_address()
    del group
