"""Counters of what a rank of the demo sends and spends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparcel.ddp import Handle


@dataclass
class Meter:
    """What a rank has sent and spent so far, by sparcel's count and by the interface's.

    Attributes
    ----------
    handle
        sparcel's, or None where DDP exchanges by itself, which doesn't count.
    interface
        One that carries this rank's traffic alone, or None.
    """

    handle: Handle | None
    interface: str | None

    def read(self) -> dict[str, float]:
        """Return the counters: seconds, and bytes sent."""
        seen: dict[str, float] = {}
        if self.handle is not None:
            stats = self.handle.stats()
            seen["select_s"] = stats.select_seconds
            seen["communicate_s"] = stats.communicate_seconds
            seen["payload_bytes"] = stats.bytes_sent
        if self.interface is not None:
            seen["wire_bytes"] = _bytes_sent(self.interface)
        return seen


def _bytes_sent(interface: str) -> int:
    """Return what an interface of this network namespace has sent, all headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LookupError(f"/proc/net/dev has no interface {interface}")
