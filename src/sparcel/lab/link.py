"""The link that joins a node to the switch of an emulated network."""

from __future__ import annotations

from dataclasses import dataclass

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
