"""The link that joins a node to the switch of an emulated network, and what it has carried."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sparcel.core import units
from sparcel.errors import InputError

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
