"""A network of processes on this machine that reach each other over loopback."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from sparcel.lab.emulated import LabUnavailableError

_PORTS = range(20_000, 30_000)

_GUARD = Path(__file__).with_name("guard.py")


class Loopback:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
