"""Networks to run distributed workers on: emulated Ethernet, or plain loopback.

A network says at which address a node is reached, through which interface, and how a command is
run there. :func:`open_network` gives the emulated one where the system permits it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from sparcel.errors import InputError, SparcelError
from sparcel.lab.link import Link

_SUBNET = ipaddress.ip_network("10.77.0.0/16")
_HERE = Path(__file__).parent
_MOST_NODES = 250  # so many descriptors fit in one message: 253, with the three shared namespaces


class LabUnavailableError(SparcelError):
    """The emulated network can't be built on this system; the message says why in one line."""


class Loopback:
    """Nodes that are plain processes of this machine, reaching each other over loopback.

    Parameters
    ----------
    nodes
        How many.
    reason
        Why it is loopback and not an emulated network, for :attr:`description`.
    """

    link = None

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
        """Return a TCP port of node 0 that nobody listens on."""
        with socket.socket() as probe:
            probe.bind((self.address(0), 0))
            port: int = probe.getsockname()[1]
            return port

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        """Return what to execute, in a session of its own, so that ``argv`` runs on a node."""
        return [sys.executable, "-P", str(_HERE / "guard.py"), *argv]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that a process started by :meth:`command` has to inherit."""
        return ()

    def close(self) -> None:
        """Take the network down."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class EmulatedNetwork:
    """Nodes in network namespaces, each joined to one switch by a rate-limited link.

    The nodes see each other and nothing else. Everything hangs on one process
    (:mod:`sparcel.lab.switch`) that ends when :meth:`close` is called or this process dies, by
    whatever signal; the kernel then kills whatever runs on the nodes and drops the namespaces.

    Parameters
    ----------
    nodes
        How many, at least 1.
    link
        Each node's link to the switch.

    Raises
    ------
    LabUnavailableError
        When the system has no network namespaces or doesn't let this user make them.
    """

    interface = "eth0"

    def __init__(self, nodes: int, link: Link) -> None:
        self.nodes = nodes
        self.link = link
        self.description = f"{nodes} nodes joined by emulated Ethernet of {link}"
        self._hosts = [str(_SUBNET[node + 1]) for node in range(nodes)]
        self._namespaces: list[int] = []
        _require_tools()
        # Real root needs no user namespace, and keeps its rights over everybody's files without.
        self._user_namespace = os.geteuid() != 0
        try:
            self._start()
        except LabUnavailableError:
            if self._user_namespace:
                raise
            self._user_namespace = True
            self._start()

    def _start(self) -> None:
        """Start the switch and take the descriptors of its namespaces: user, mnt, pid, nets."""
        self._control, theirs = socket.socketpair()
        settings = {
            "socket": theirs.fileno(),
            "addresses": self._hosts,
            "prefix": _SUBNET.prefixlen,
            "link": asdict(self.link),
        }
        user = ["--user", "--map-root-user"] if self._user_namespace else []
        unshare = ["unshare", *user, "--net", "--mount", "--pid", "--mount-proc", "--kill-child"]
        switch = [sys.executable, "-P", str(_HERE / "switch.py"), json.dumps(settings)]
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
            message, self._namespaces, _, _ = socket.recv_fds(self._control, 4096, self.nodes + 3)
            if message != b"ready":
                raise LabUnavailableError(message.decode() or self._last_words())
        except BaseException:
            self.close()
            raise

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"unshare ended with status {self._process.wait()}"

    def address(self, node: int) -> str:
        """Return the IP address of a node."""
        return self._hosts[node]

    def free_port(self) -> int:
        """Return a TCP port of node 0 that nobody listens on: any, the nodes are new."""
        return 29500

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        """Return what to execute, in a session of its own, so that ``argv`` runs on a node.

        The process must inherit :attr:`descriptors`. As it joins namespaces by their open files,
        it fails, and reaches no other process, when the network is gone meanwhile.
        """
        user, mount, pid, *nets = (f"/proc/self/fd/{number}" for number in self._namespaces)
        enter = [f"--mount={mount}", f"--pid={pid}", f"--net={nets[node]}", f"--wd={os.getcwd()}"]
        if self._user_namespace:
            enter += [f"--user={user}", "--preserve-credentials"]
        return ["nsenter", *enter, "--", *argv]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that a process started by :meth:`command` has to inherit."""
        return tuple(self._namespaces)

    def close(self) -> None:
        """Take the network down, with every process that runs on its nodes."""
        for namespace in self._namespaces:
            os.close(namespace)
        self._namespaces = []
        self._control.close()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


Network = EmulatedNetwork | Loopback


def _require_tools() -> None:
    if sys.platform != "linux":
        raise LabUnavailableError(f"network namespaces are Linux's, this is {sys.platform}")
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            raise LabUnavailableError(f"{tool} is missing, Debian has it in util-linux")


def open_network(nodes: int, link: Link | None) -> Network:
    """Build an emulated network, or fall back on loopback where that isn't possible.

    Parameters
    ----------
    nodes
        How many nodes, 1 to 250.
    link
        The link of each node; None asks for loopback.

    Returns
    -------
    EmulatedNetwork or Loopback
        To be closed, or used in a ``with`` statement. Its ``description`` says in one line what it
        is, and for a fallback why.

    Raises
    ------
    InputError
        When there can't be a network of so many nodes.
    """
    if not 1 <= nodes <= _MOST_NODES:
        raise InputError(f"a network has 1 to {_MOST_NODES} nodes, got {nodes}")
    if link is None:
        return Loopback(nodes)
    try:
        return EmulatedNetwork(nodes, link)
    except LabUnavailableError as error:
        return Loopback(nodes, reason=str(error))
