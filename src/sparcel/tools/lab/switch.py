"""The first process of an emulated network, which builds the network and keeps it alive.

`sparcel.tools.lab.network` starts this file as process 1 of new PID, network and mount namespaces.
The process joins the nodes' network namespaces by a bridge in its own, sends the descriptors of the
namespaces back, and serves its parent's requests until the parent closes the socket or dies. Where
packets are to be delayed or lost, the kernel's netem does it at the bridge's ports. If the kernel
has none, the process itself is the switch in place of the bridge.
Nothing here has a name outside. When process 1 ends, for whatever reason, the kernel kills every
process of the PID namespace; the other namespaces vanish with their last users.

This file runs as a script and imports nothing of sparcel, because that would load torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_MS_BIND = 4096
_OWN = ("user", "mnt", "pid", "ipc")
_BURST_BYTES = 128 * 1024
"""Bytes that may pass at once after an idle time: at least the largest packet that TCP hands to a
link (64 KiB), and the rate times the kernel's timer error."""

_NETEM_PACKETS = 10**6  # far more than are ever under way, as senders wait for acknowledgements

# Of Linux's packet sockets: names that Python does not have.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_RCVBUFFORCE, _ETH_P_ALL = 33, 3
_HEADER = 10  # bytes of what comes before a frame
_LARGEST_FRAME = _HEADER + 18 + (1 << 16)
_TCP_HEADERS = 66  # bytes of Ethernet, IPv4 and TCP with timestamps
_RECEIVED_BYTES = 64 << 20
_AT_ONCE = 64  # frames to receive before those that are due are sent
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


def _limit(ip: Any, index: int, rate: int, link: dict[str, Any], **place: str) -> None:
    """Limit the rate of packets that leave through an interface, by a token bucket."""
    queue_bytes = int(rate / 8 * link["queue_s"]) + _BURST_BYTES
    limit = min(queue_bytes, 2**32 - 1)
    ip.tc("add", "tbf", index, rate=rate / 8, burst=_BURST_BYTES, limit=limit, **place)


def _limit_port(ip: Any, index: int, link: dict[str, Any]) -> None:
    """Delay, lose and limit packets that leave through a port, in this order."""
    place = {}
    if _held_back(link):
        held = {"delay": 1e6 * link["delay_s"], "loss": 100 * link["loss"], "limit": _NETEM_PACKETS}
        ip.tc("add", "netem", index, handle="1:", **held)
        place = {"parent": "1:1"}
    _limit(ip, index, link["down_bits_per_s"], link, **place)


def _configure_node(namespace: int, address: str, prefix: int, link: dict[str, Any]) -> None:
    with _inside(namespace), IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
        (index,) = ip.link_lookup(ifname="eth0")
        ip.addr("add", index=index, address=address, prefixlen=prefix)
        ip.link("set", index=index, mtu=link["mtu_bytes"], state="up")
        if link["loss"]:  # of packets, not of the 64 KiB that TCP hands over at once
            ip.link("set", index=index, gso_max_segs=1)
        _limit(ip, index, link["rate_bits_per_s"], link)


class _Relay:
    """The switch where the kernel has no netem: it passes frames on late, or not at all.

    It has a packet socket on each port. Before a frame, which may be of 64 KiB, comes a header in
    which the kernel notes what hardware would do: cut the frame into packets, compute checksums.
    Frames leave with that header, so that the receiver gets them whole.
    """

    def __init__(self, nodes: int, link: dict[str, Any]) -> None:
        self._ports: dict[int, socket.socket] = {}  # by node
        for node in range(nodes):
            port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
            port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
            port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            with suppress(OSError):  # in a user namespace, the system's limit holds
                port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVED_BYTES)
            port.bind((f"port{node}", _ETH_P_ALL))
            self._ports[node] = port
        self._senders = {port: node for node, port in self._ports.items()}
        self._link = link
        self._s_per_byte = 8 / link["down_bits_per_s"]
        self._nodes: dict[bytes, int] = {}  # by Ethernet address
        self._free = [0.0] * nodes  # when the link to a node has carried what waits for it
        self._waiting: list[tuple[float, int, bytes]] = []  # heap: when due, to which node, what
        self._buffer = bytearray(_LARGEST_FRAME)
        with suppress(OSError):  # before the workers, who may use all cores
            os.setpriority(os.PRIO_PROCESS, 0, -20)

    def cut(self, node: int) -> None:
        """Drop what comes from a node and goes to it from now on."""
        if node in self._ports:
            self._ports.pop(node).close()

    def work_until(self, parent: socket.socket) -> None:
        """Pass frames on until the parent has a request."""
        ready: list[socket.socket] = []
        while parent not in ready:
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, node, frame = heappop(self._waiting)
                if node in self._ports:
                    with suppress(OSError):  # the node cannot take it now, and no one else waits
                        self._ports[node].send(frame)
            pause = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            ready, _, _ = select.select([parent, *self._ports.values()], [], [], pause)
            for port in ready:
                if port is not parent:
                    self._receive(port)

    def _receive(self, port: socket.socket) -> None:
        with suppress(OSError):  # nothing more has come
            for _ in range(_AT_ONCE):
                size = port.recv_into(self._buffer)
                self._take(self._senders[port], bytes(memoryview(self._buffer)[:size]))

    def _take(self, sender: int, frame: bytes) -> None:
        """Plan when a frame leaves, once for each node that it is for."""
        addresses = frame[_HEADER : _HEADER + 12]
        self._nodes[addresses[6:]] = sender
        receiver = self._nodes.get(addresses[:6])
        if random.random() < self._link["loss"]:
            return
        length, piece = len(frame) - _HEADER, int.from_bytes(frame[4:6], sys.byteorder)
        if piece:  # bytes of data in each packet that the frame stands for
            length += (-(-(length - _TCP_HEADERS) // piece) - 1) * _TCP_HEADERS
        there = time.monotonic() + self._link["delay_s"]
        for node in self._ports if receiver is None else [receiver]:
            start = max(there, self._free[node])
            if node != sender and start - there <= self._link["queue_s"]:
                self._free[node] = start + length * self._s_per_byte
                heappush(self._waiting, (self._free[node], node, frame))


def _held_back(link: dict[str, Any]) -> bool:
    return bool(link["delay_s"] or link["loss"])


def _has_netem() -> bool:
    """Whether the kernel has netem: the loopback interface, which is not used here, tells."""
    with IPRoute() as ip:
        try:
            ip.tc("add", "netem", ip.link_lookup(ifname="lo")[0])
        except NetlinkError:
            return False
    return True


def build(
    names: dict[str, str], prefix: int, link: dict[str, Any], relayed: bool
) -> list[tuple[int, int]]:
    """Build the network in this process's namespaces.

    Parameters
    ----------
    names
        Address by node name.
    prefix
        Number of bits of an address that identify the network.
    link
        The fields of :class:`sparcel.lab.Link`, of which ``queue_s`` has a round trip's delay too.
    relayed
        Whether the ports are left to a `_Relay`, and no bridge joins them.

    Returns
    -------
    list of (int, int)
        Descriptors of each node's network and UTS namespaces.
    """
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
            master = 0 if relayed else bridge
            ip.link("set", index=port, master=master, mtu=link["mtu_bytes"], state="up")
            if not relayed:
                _limit_port(ip, port, link)
    for (namespace, _), address in zip(nodes, names.values(), strict=True):
        _configure_node(namespace, address, prefix, link)
    return nodes


def _cut(node: int) -> None:
    """Remove a node's port from the switch, so that packets vanish and neither side is told."""
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


def _serve(parent: socket.socket, nodes: list[tuple[int, int]], relay: _Relay | None) -> None:
    """Serve the parent's requests, such as ``cut 2``, until it closes the socket or dies."""
    while True:
        if relay:
            relay.work_until(parent)
        request = parent.recv(64).decode()
        if not request:
            return
        what, node = request.split()
        if what == "kill":
            _kill(nodes[int(node)][0])
        elif relay:
            relay.cut(int(node))
        else:
            _cut(int(node))
        parent.sendall(b"done")


def main() -> None:
    """Build the network that the first argument describes, report it, and serve requests."""
    description = json.loads(sys.argv[1])
    with socket.socket(fileno=description["socket"]) as parent:
        try:
            link = description["link"]
            relayed = _held_back(link) and not _has_netem()
            nodes = build(description["names"], description["prefix"], link, relayed)
            relay = _Relay(len(nodes), link) if relayed else None
        except Exception as error:  # the parent reports any failure to the user
            parent.sendall(f"{type(error).__name__}: {error}".encode())
            sys.exit(1)
        own = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in _OWN]
        socket.send_fds(parent, [b"ready"], own)
        for node in nodes:
            socket.send_fds(parent, [b"node"], node)
        for descriptor in own:
            os.close(descriptor)
        _serve(parent, nodes, relay)


if __name__ == "__main__":
    main()
