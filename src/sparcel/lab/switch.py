"""The first process of an emulated network, which builds the network and keeps it alive.

`sparcel.lab.emulated` starts this file as process 1 of new PID, network and mount namespaces.
The process joins the nodes' network namespaces by a bridge in its own, sends the descriptors of the
namespaces back, and serves its parent's requests until the parent closes the socket or dies.
Nothing here has a name outside. When process 1 ends, for whatever reason, the kernel kills every
process of the PID namespace; the other namespaces vanish with their last users.

This file runs as a script and imports nothing of sparcel, because that would load torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_MS_BIND = 4096
_OWN = ("user", "mnt", "pid", "ipc")
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


@contextmanager
def _inside(namespace: int) -> Iterator[None]:
    """Run the block in a network namespace."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _checked(_libc.setns(namespace, _CLONE_NEWNET), "setns")
        yield
    finally:
        _checked(_libc.setns(home, _CLONE_NEWNET), "setns")
        os.close(home)


def _new_node(name: str) -> tuple[int, int]:
    """Make a node's network and UTS namespaces; return descriptors that keep them alive."""
    homes = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]
    _checked(_libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS), "unshare")
    socket.sethostname(name)
    net, uts = (os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts"))
    for home in homes:
        _checked(_libc.setns(home, 0), "setns")
        os.close(home)
    return net, uts


def _mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    paths = (source.encode(), target.encode(), None if kind is None else kind.encode())
    _checked(_libc.mount(*paths, ctypes.c_ulong(flags), None), f"mount {target}")


def _own_files(names: dict[str, str]) -> None:
    """Make the nodes' names resolve, and give the nodes a /dev/shm of their own."""
    _mount("sparcel", "/dev/shm", "tmpfs")
    hosts = Path("/dev/shm/hosts")
    lines = ["127.0.0.1 localhost\n"]
    # A socket for both IPv6 and IPv4 looks up the second form of the address.
    lines += [f"{address} {name}\n::ffff:{address} {name}\n" for name, address in names.items()]
    hosts.write_text("".join(lines))
    if Path("/etc/hosts").exists():  # the mount outlives the file's name
        _mount(str(hosts), "/etc/hosts", None, _MS_BIND)
    hosts.unlink()


def _limit(ip: Any, index: int, link: dict[str, Any]) -> None:
    """Limit the rate of packets that leave through an interface, by a token bucket."""
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


def build(names: dict[str, str], prefix: int, link: dict[str, Any]) -> list[tuple[int, int]]:
    """Build the network in this process's namespaces.

    Parameters
    ----------
    names
        Address by node name.
    prefix
        Number of bits of an address that identify the network.
    link
        The fields of :class:`sparcel.lab.Link`.

    Returns
    -------
    list of (int, int)
        Descriptors of each node's network and UTS namespaces.
    """
    from pyroute2 import IPRoute

    _own_files(names)
    nodes = [_new_node(name) for name in names]
    with IPRoute() as ip:
        ip.link("add", ifname="switch", kind="bridge")
        (bridge,) = ip.link_lookup(ifname="switch")
        ip.link("set", index=bridge, mtu=link["mtu_bytes"], state="up")
        for node, (namespace, _) in enumerate(nodes):
            peer = {"ifname": "eth0", "net_ns_fd": namespace}
            ip.link("add", ifname=f"port{node}", kind="veth", peer=peer)
            (port,) = ip.link_lookup(ifname=f"port{node}")
            ip.link("set", index=port, master=bridge, mtu=link["mtu_bytes"], state="up")
            _limit(ip, port, link)
    for (namespace, _), address in zip(nodes, names.values(), strict=True):
        _configure_node(namespace, address, prefix, link)
    return nodes


def _cut(node: int) -> None:
    """Remove a node's port from the switch, so that packets vanish and neither side is told."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname=f"port{node}")[0], master=0)


def _kill(namespace: int) -> None:
    """Kill every process in a network namespace, including those that start meanwhile."""
    wanted = os.fstat(namespace)
    found = True
    while found:
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is a zombie in no namespace
                if os.path.samestat(os.stat(entry / "ns/net"), wanted):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True


def _serve(parent: socket.socket, nodes: list[tuple[int, int]]) -> None:
    """Serve the parent's requests, such as ``cut 2``, until it closes the socket or dies."""
    while request := parent.recv(64):
        what, node = request.decode().split()
        if what == "cut":
            _cut(int(node))
        else:
            _kill(nodes[int(node)][0])
        parent.sendall(b"done")


def main() -> None:
    """Build the network that the first argument describes, report it, and serve requests."""
    description = json.loads(sys.argv[1])
    with socket.socket(fileno=description["socket"]) as parent:
        try:
            nodes = build(description["names"], description["prefix"], description["link"])
        except Exception as error:  # the parent reports any failure to the user
            parent.sendall(f"{type(error).__name__}: {error}".encode())
            sys.exit(1)
        own = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in _OWN]
        socket.send_fds(parent, [b"ready"], own)
        for node in nodes:
            parent.recv(1)  # the parent asks for each message, so that two never merge
            socket.send_fds(parent, [b"node"], node)
        for descriptor in own:
            os.close(descriptor)
        _serve(parent, nodes)


if __name__ == "__main__":
    main()
