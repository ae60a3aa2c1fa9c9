"""The link that joins a node to the switch of an emulated network, and what it has carried."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sparcel import units
from sparcel.errors import InputError


@dataclass(frozen=True)
class Link:
    """A full-duplex Ethernet link with the same limits in both directions.

    Attributes
    ----------
    rate_bits_per_s
        Rate in each direction, Ethernet headers included.
    burst_bytes
        Bytes that may pass at once after an idle time. The burst must cover the largest packet that
        TCP hands to the link (64 KiB), and the rate times the kernel's timer error.
    queue_s
        Seconds that a packet may wait for the link; a full queue drops packets.
    mtu_bytes
        Largest IP packet.
    """

    rate_bits_per_s: int = 10**9
    burst_bytes: int = 128 * 1024
    queue_s: float = 0.05
    mtu_bytes: int = 1500

    def __str__(self) -> str:
        for unit, scale in (("Gbit/s", 10**9), ("Mbit/s", 10**6)):
            if self.rate_bits_per_s >= scale:
                return f"{self.rate_bits_per_s / scale:g} {unit}"
        return f"{self.rate_bits_per_s / 1000:g} kbit/s"


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
