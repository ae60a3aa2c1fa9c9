"""Networks on which to run distributed workers: emulated Ethernet, or plain loopback.

A network tells the address and the interface of each node, and how to run a command there.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from sparcel.errors import InputError
from sparcel.lab.emulated import EmulatedNetwork, LabUnavailableError
from sparcel.lab.link import Link

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

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that the process of :meth:`command` must inherit."""
        return ()

    def close(self) -> None:
        """Do nothing: there is no network to remove."""

    def __exit__(self, *error: object) -> None:
        self.close()


Network = EmulatedNetwork | Loopback

_MOST_NODES = 250  # one message carries at most 253 descriptors, three of them shared namespaces


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
