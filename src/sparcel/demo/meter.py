"""Counters of the bytes that a rank of the demo sends, and of its seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparcel.ddp import Handle


@dataclass
class Meter:
    """Bytes and seconds of a rank so far, from sparcel's counters and the interface's.

    Attributes
    ----------
    handle
        Handle of `sparcel.attach`, or None if DDP exchanges by itself, without counters.
    interface
        Name of an interface that carries only this rank's traffic, or None.
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
    """Return the bytes that an interface of this network namespace has sent, with headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LookupError(f"/proc/net/dev has no interface {interface}")
