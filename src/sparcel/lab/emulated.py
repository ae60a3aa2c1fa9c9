"""Nodes in network namespaces of this machine, joined by rate-limited links."""

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
from typing import Self

from sparcel.errors import SparcelError
from sparcel.lab.link import Link

_SUBNET = ipaddress.ip_network("10.77.0.0/16")
_NEW = ["--net", "--uts", "--ipc", "--mount", "--pid"]
_SWITCH = Path(__file__).with_name("switch.py")


class LabUnavailableError(SparcelError):
    """The emulated network can't be built on this system; the message says why in one line."""


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
        self._names = {f"node{node}": str(_SUBNET[node + 1]) for node in range(nodes)}
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
        """Start the switch; take descriptors of user, mnt, pid, ipc, and every node's net, uts."""
        self._control, theirs = socket.socketpair()
        settings = {
            "socket": theirs.fileno(),
            "names": self._names,
            "prefix": _SUBNET.prefixlen,
            "link": asdict(self.link),
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
                raise LabUnavailableError(message.decode() or self._last_words())
            for _ in range(self.nodes):
                self._control.sendall(b"n")
                self._namespaces += socket.recv_fds(self._control, 4, 2)[1]
        except BaseException:
            self.close()
            raise

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"unshare ended with status {self._process.wait()}"

    def address(self, node: int) -> str:
        """Return the IP address of a node."""
        return self._names[f"node{node}"]

    def free_port(self) -> int:
        """Return a TCP port of node 0 that nobody listens on: any, the nodes are new."""
        return 29500

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        """Return what to execute, in a session of its own, so that ``argv`` runs on a node.

        The process must inherit :attr:`descriptors`. As it joins namespaces by their open files,
        it fails, and reaches no other process, when the network is gone meanwhile.
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
        """Open files that a process started by :meth:`command` has to inherit."""
        return tuple(self._namespaces)

    def kill_node(self, node: int) -> None:
        """Kill every process of a node at once, as a crash of its system would."""
        self._ask(f"kill {node}")

    def cut_link(self, node: int) -> None:
        """Let all that a node sends or is sent vanish from now on, with no sign to either end."""
        self._ask(f"cut {node}")

    def _ask(self, request: str) -> None:
        self._control.sendall(request.encode())
        if self._control.recv(4) != b"done":
            raise SparcelError(f"the lab's switch ended at the request to {request}")

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

    def __exit__(self, *error: object) -> None:
        self.close()


def _require_tools() -> None:
    if sys.platform != "linux":
        raise LabUnavailableError(f"network namespaces are Linux's, this is {sys.platform}")
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            raise LabUnavailableError(f"{tool} is missing, Debian has it in util-linux")
