"""The emulated network's first process: builds it, and takes it along when it ends.

:mod:`sparcel.lab.emulated` starts this file as process 1 of new PID, network and mount namespaces.
It joins the nodes' network namespaces by a bridge in its own, sends the namespaces' descriptors
back, and waits for its parent to close the socket or die. Nothing here has a name outside: when
process 1 goes, for whatever reason, the kernel kills every process of the PID namespace, and the
network namespaces vanish with the last of their holders.

It runs as a file, with nothing of sparcel imported, since that would load torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


@contextmanager
def _inside(namespace: int) -> Iterator[None]:
    """Move this thread into a network namespace for a while."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _checked(_libc.setns(namespace, _CLONE_NEWNET), "setns")
        yield
    finally:
        _checked(_libc.setns(home, _CLONE_NEWNET), "setns")
        os.close(home)


def _new_namespace() -> int:
    """Make a network namespace and return the descriptor that keeps it alive."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    _checked(_libc.unshare(_CLONE_NEWNET), "unshare")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    _checked(_libc.setns(home, _CLONE_NEWNET), "setns")
    os.close(home)
    return namespace


def _limit(ip: Any, index: int, link: dict[str, Any]) -> None:
    """Limit what leaves through an interface by a token bucket."""
    rate_bytes_per_s = link["rate_bits_per_s"] / 8
    ip.tc(
        "add",
        "tbf",
        index,
        rate=rate_bytes_per_s,
        burst=link["burst_bytes"],
        limit=int(rate_bytes_per_s * link["queue_s"]) + link["burst_bytes"],
    )


def _configure_node(namespace: int, address: str, prefix: int, link: dict[str, Any]) -> None:
    from pyroute2 import IPRoute

    with _inside(namespace), IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
        (index,) = ip.link_lookup(ifname="eth0")
        ip.addr("add", index=index, address=address, prefixlen=prefix)
        ip.link("set", index=index, mtu=link["mtu_bytes"], state="up")
        _limit(ip, index, link)


def build(addresses: list[str], prefix: int, link: dict[str, Any]) -> list[int]:
    """Build the network in this process's namespace.

    Returns
    -------
    list of int
        A descriptor of each node's network namespace.
    """
    from pyroute2 import IPRoute

    namespaces = [_new_namespace() for _ in addresses]
    with IPRoute() as ip:
        ip.link("add", ifname="switch", kind="bridge")
        (bridge,) = ip.link_lookup(ifname="switch")
        ip.link("set", index=bridge, mtu=link["mtu_bytes"], state="up")
        for node, namespace in enumerate(namespaces):
            peer = {"ifname": "eth0", "net_ns_fd": namespace}
            ip.link("add", ifname=f"port{node}", kind="veth", peer=peer)
            (port,) = ip.link_lookup(ifname=f"port{node}")
            ip.link("set", index=port, master=bridge, mtu=link["mtu_bytes"], state="up")
            _limit(ip, port, link)
    for namespace, address in zip(namespaces, addresses, strict=True):
        _configure_node(namespace, address, prefix, link)
    return namespaces


def main() -> None:
    """Build the network that the first argument describes, report it, and wait for the end."""
    settings = json.loads(sys.argv[1])
    with socket.socket(fileno=settings["socket"]) as parent:
        try:
            nets = build(settings["addresses"], settings["prefix"], settings["link"])
        except Exception as error:  # any failure means "not here": the parent tells the user
            parent.sendall(f"{type(error).__name__}: {error}".encode())
            sys.exit(1)
        own = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt", "pid")]
        socket.send_fds(parent, [b"ready"], own + nets)
        for descriptor in own + nets:
            os.close(descriptor)
        parent.recv(1)  # nothing ever comes but the end


if __name__ == "__main__":
    main()
