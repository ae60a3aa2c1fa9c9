"""A network of processes on this machine that reach each other over loopback."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_GUARD = Path(__file__).with_name("guard.py")


class Loopback:
    """Nodes that are plain processes of this machine and use the loopback interface.

    Parameters
    ----------
    nodes
        Number of nodes.
    reason
        Why this is no emulated network, for :attr:`description`.
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
        """Return a free TCP port of node 0."""
        with socket.socket() as probe:
            probe.bind((self.address(0), 0))
            port: int = probe.getsockname()[1]
            return port

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a node; execute it in a new session."""
        return [sys.executable, "-P", str(_GUARD), *argv]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that the process of :meth:`command` must inherit."""
        return ()

    def close(self) -> None:
        """Do nothing: there is no network to remove."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
