"""Counts what the link of a rank's node carries; called by the ranks of a program in the lab."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


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
