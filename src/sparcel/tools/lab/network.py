"""Networks on which to run distributed workers: emulated Ethernet, or plain loopback.

A network tells the address and the interface of each node, and how to run a command there. Of an
emulated one, a link joins each node to the switch.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from sparcel.core import units
from sparcel.errors import InputError, SparcelError, optional

_LONGEST_S = 10


@dataclass(frozen=True)
class Link:
    """A full-duplex Ethernet link, and how late and how surely packets pass between two of them.

    Attributes
    ----------
    rate_bits_per_s
        Rate in each direction, Ethernet headers included.
    queue_s
        Seconds that a packet may wait for the link, in addition to a round trip's delay; a full
        queue drops packets.
    mtu_bytes
        Largest IP packet.
    down_bits_per_s
        Rate of what reaches the node if it differs; `rate_bits_per_s` is then that of what leaves.
    delay_s
        Seconds that a packet takes from a node to another, besides what it takes at the rates and
        in the queues. A round trip takes twice that.
    loss
        Share of the packets between two nodes that are lost, at random. With a loss, every packet
        of TCP crosses the network by itself, which costs processor time.

    Raises
    ------
    InputError
        When the delay is not 0 to 10 s, or the loss not at least 0 and below 1.
    """

    rate_bits_per_s: int = 10**9
    queue_s: float = 0.05
    mtu_bytes: int = 1500
    down_bits_per_s: int | None = None
    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= _LONGEST_S:
            raise InputError(f"a delay must be 0 to {_LONGEST_S} s, got {self.delay_s:g} s")
        if not 0 <= self.loss < 1:
            raise InputError(f"a loss must be at least 0 and below 100%, got {100 * self.loss:g}%")

    def __str__(self) -> str:
        text = _rate(self.rate_bits_per_s)
        if self.down_bits_per_s not in (None, self.rate_bits_per_s):
            text += f" up and {_rate(self.down_bits_per_s)} down"
        if self.delay_s:
            text += f", with a delay of {1000 * self.delay_s:g} ms"
        if self.loss:
            text += f", with a loss of {100 * self.loss:g} %"
        return text


def _rate(bits_per_s: int) -> str:
    for unit, scale in (("Gbit/s", 10**9), ("Mbit/s", 10**6)):
        if bits_per_s >= scale:
            return f"{bits_per_s / scale:g} {unit}"
    return f"{bits_per_s / 1000:g} kbit/s"


def parse_link(rate: str, delay: str = "0s", loss: str = "0%") -> Link:
    """Return a link as ``sparcel lab run`` is told it.

    Parameters
    ----------
    rate
        A rate such as ``1gbit``, or ``110mbit/500mbit`` for what leaves a node and what reaches it.
    delay
        Time that a packet takes from a node to another, such as ``50ms``.
    loss
        Share of the packets that are lost, such as ``0.1%``.

    Raises
    ------
    InputError
        When one of them is no such text, or out of its range; see `parse_rate` and `Link`.
    """
    up, both, down = rate.partition("/")
    return Link(
        parse_rate(up),
        down_bits_per_s=parse_rate(down) if both else None,
        delay_s=units.seconds(delay),
        loss=units.share(loss),
    )


def parse_rate(text: str) -> int:
    """Return a rate such as ``1gbit`` or ``2.5gbit`` in bits a second.

    Raises
    ------
    InputError
        When the text is not a positive number with one of the units kbit, mbit and gbit, or
        the rate lies outside 64 kbit/s to 32 Gbit/s (the kernel's rate limiter counts bytes a
        second in 32 bits).
    """
    rate = units.bits_per_s(text)
    if not 64_000 <= rate <= 32 * 10**9:
        raise InputError(f"a rate must lie between 64kbit and 32gbit, got {text!r}")
    return rate


class LinkBytes(NamedTuple):
    """Bytes that a link has carried in each direction, headers included."""

    sent: int
    received: int


def link_bytes() -> LinkBytes | None:
    """Return the bytes that the link of this rank's node has carried since the network was made.

    All ranks of a node share its link. None where there is no emulated link: on loopback, and
    outside of the lab.
    """
    if not os.environ.get("SPARCEL_LAB_RATE_BITS_PER_S"):
        return None
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counters,) = (line.split()[1:] for line in lines if line.strip().startswith(f"{interface}:"))
    return LinkBytes(sent=int(counters[8]), received=int(counters[0]))


_SUBNET = ipaddress.ip_network("10.77.0.0/16")
_NEW = ["--net", "--uts", "--ipc", "--mount", "--pid"]
_SWITCH = Path(__file__).with_name("switch.py")


class LabUnavailableError(SparcelError):
    """The system cannot emulate a network; the message tells why in one line."""


class EmulatedNetwork(AbstractContextManager["EmulatedNetwork"]):
    """Nodes in network namespaces, each joined to one switch by a rate-limited link.

    The nodes reach each other and nothing else. One process (``lab.switch``) keeps the
    network alive. It ends when :meth:`close` is called, and when this process dies by any signal;
    the kernel then kills all processes on the nodes and removes the namespaces.

    Parameters
    ----------
    nodes
        Number of nodes, at least 1.
    link
        Each node's link to the switch.

    Raises
    ------
    LabUnavailableError
        When the system has no network namespaces, or does not let this user make them.
    """

    interface = "eth0"

    def __init__(self, nodes: int, link: Link) -> None:
        self.nodes = nodes
        self.link = link
        self.description = f"{nodes} nodes joined by emulated Ethernet of {link}"
        self._names = {f"node{node}": str(_SUBNET[node + 1]) for node in range(nodes)}
        self._namespaces: list[int] = []
        _require_tools()
        # Real root needs no user namespace, and without one keeps its rights over all files.
        self._user_namespace = os.geteuid() != 0
        try:
            self._start()
        except LabUnavailableError:
            if self._user_namespace:
                raise
            self._user_namespace = True
            self._start()

    def _start(self) -> None:
        """Start the switch; receive descriptors: user, mnt, pid, ipc, and each node's net, uts."""
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        settings = {
            "socket": theirs.fileno(),
            "names": self._names,
            "prefix": _SUBNET.prefixlen,
            "link": {
                **asdict(self.link),
                "queue_s": self.link.queue_s + 2 * self.link.delay_s,
                "down_bits_per_s": self.link.down_bits_per_s or self.link.rate_bits_per_s,
            },
        }
        user = ["--user", "--map-root-user"] if self._user_namespace else []
        unshare = ["unshare", *user, *_NEW, "--mount-proc", "--kill-child"]
        switch = [sys.executable, "-P", str(_SWITCH), json.dumps(settings)]
        with theirs:
            self._process = subprocess.Popen(
                [*unshare, *switch],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # out of reach of a terminal's Ctrl-C
            )
        try:
            message, self._namespaces, _, _ = socket.recv_fds(self._control, 4096, 4)
            if message != b"ready":
                raise LabUnavailableError(message.decode() or self._last_error())
            for _ in range(self.nodes):
                self._namespaces += socket.recv_fds(self._control, 4, 2)[1]
        except BaseException:
            self.close()
            raise

    def _last_error(self) -> str:
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"unshare ended with status {self._process.wait()}"

    def address(self, node: int) -> str:
        """Return the IP address of a node."""
        return self._names[f"node{node}"]

    def free_port(self) -> int:
        """Return a free TCP port of node 0; all ports are free, because the nodes are new."""
        return 29500

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a node; execute it in a new session.

        The process must inherit `descriptors`. It joins the namespaces by these open files,
        so if the network is gone meanwhile, it fails and cannot reach another process.
        """
        user, mount, pid, ipc, *nodes = (f"/proc/self/fd/{number}" for number in self._namespaces)
        net, uts = nodes[2 * node : 2 * node + 2]
        enter = [f"--mount={mount}", f"--pid={pid}", f"--net={net}", f"--uts={uts}"]
        enter += [f"--ipc={ipc}", f"--wd={os.getcwd()}"]
        if self._user_namespace:
            enter += [f"--user={user}", "--preserve-credentials"]
        return ["nsenter", *enter, "--", *argv]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that the process of :meth:`command` must inherit."""
        return tuple(self._namespaces)

    def kill_node(self, node: int) -> None:
        """Kill every process of a node at once, like a crash of the node's system."""
        self._ask(f"kill {node}")

    def cut_link(self, node: int) -> None:
        """Drop all packets from and to a node from now on; neither end is told."""
        self._ask(f"cut {node}")

    def _ask(self, request: str) -> None:
        self._control.sendall(request.encode())
        if self._control.recv(4) != b"done":
            raise SparcelError(f"the lab's switch process ended during the request {request!r}")

    def close(self) -> None:
        """Remove the network and kill every process on its nodes."""
        for namespace in self._namespaces:
            os.close(namespace)
        self._namespaces = []
        self._control.close()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def _require_tools() -> None:
    if sys.platform != "linux":
        raise LabUnavailableError(f"network namespaces need Linux, this is {sys.platform}")
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            raise LabUnavailableError(f"{tool} is missing; on Debian, install util-linux")
    if find_spec("pyroute2") is None:  # it takes long to import, and the switch alone needs it
        with optional("an emulated network", "lab"):
            raise ModuleNotFoundError(name="pyroute2")


_PORTS = range(20_000, 30_000)
_GUARD = Path(__file__).with_name("guard.py")


class Loopback(AbstractContextManager["Loopback"]):
    """Nodes that are plain processes of this machine and use the loopback interface.

    Parameters
    ----------
    nodes
        Number of nodes.
    reason
        Why this is no emulated network, for `description`.
    """

    link = None
    descriptors = ()

    def __init__(self, nodes: int, reason: str = "") -> None:
        self.nodes = nodes
        self.interface = "lo" if sys.platform == "linux" else "lo0"
        self.description = f"{nodes} processes on loopback, with no rate limit"
        if reason:
            self.description += f" (no emulated network: {reason})"

    def address(self, node: int) -> str:
        """Return the IP address of a node."""
        return "127.0.0.1"

    def free_port(self) -> int:
        """Return a free TCP port of node 0.

        It lies below the ports that systems give to connections, so that no connection takes it
        before the job listens there.
        """
        for port in random.sample(_PORTS, len(_PORTS)):
            with socket.socket() as probe, suppress(OSError):
                probe.bind((self.address(0), port))
                return port
        raise LabUnavailableError(f"no TCP port in {_PORTS} is free")

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a node; execute it in a new session."""
        return [sys.executable, "-P", str(_GUARD), *argv]

    def close(self) -> None:
        """Do nothing: there is no network to remove."""

    def __exit__(self, *error: object) -> None:
        self.close()


Network = EmulatedNetwork | Loopback

_MOST_NODES = 250  # more than the cores of one machine would run at the rate of a link


def open_network(nodes: int, link: Link | None) -> Network:
    """Build an emulated network, or fall back on loopback if that is not possible.

    Parameters
    ----------
    nodes
        Number of nodes, 1 to 250.
    link
        The link of each node; None stands for loopback.

    Returns
    -------
    EmulatedNetwork or Loopback
        The network; close it, or use it in a ``with`` statement. Its ``description`` names the
        network in one line and, for a fallback, gives the reason.

    Raises
    ------
    InputError
        When ``nodes`` is out of its range.
    """
    if not 1 <= nodes <= _MOST_NODES:
        raise InputError(f"a network has 1 to {_MOST_NODES} nodes, got {nodes}")
    if link is None:
        return Loopback(nodes)
    try:
        return EmulatedNetwork(nodes, link)
    except LabUnavailableError as error:
        return Loopback(nodes, reason=str(error))
