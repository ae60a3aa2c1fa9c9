"""The addresses at which a process listens for other ranks."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
from contextlib import closing, suppress
from ipaddress import ip_address

LOOPBACK = "127.0.0.1"

_INTERFACE_ADDRESS = {"Linux": 0x8915, "Darwin": 0xC0206921}
"""The ioctl that returns an interface's IPv4 address (SIOCGIFADDR)."""


def gloo_address() -> str:
    """Return the address at which torch's Gloo listens in this process.

    That is the address of the interface in ``GLOO_SOCKET_IFNAME``. Without the variable, it is the
    first address of the hostname that this machine has, and loopback if there is none.
    """
    return address_of_interface() or _address_of_hostname() or LOOPBACK


def address_of_interface() -> str | None:
    """Return the IPv4 address of the interface in ``GLOO_SOCKET_IFNAME``, if there is one.

    The variable may list several interfaces, separated by commas; the first one counts.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    request = struct.pack("256s", interface.encode()[:15])
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe, _INTERFACE_ADDRESS[platform.system()], request)
        return socket.inet_ntoa(answer[20:24])
    return None


def _address_of_hostname() -> str | None:
    with suppress(OSError):  # the hostname has no address
        kind = socket.SOCK_STREAM
        for family, _, _, _, there in socket.getaddrinfo(socket.gethostname(), 0, type=kind):
            with suppress(OSError), closing(socket.socket(family, kind)) as probe:
                probe.bind(there)
                return str(there[0])
    return None


def address_towards(host: str) -> str:
    """Return the source address of packets that this machine sends to a host.

    Raises
    ------
    OSError
        When there is no route to the host.
    """
    any_port = 9
    family, kind, protocol, _, there = socket.getaddrinfo(host, any_port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(there)  # connecting a datagram socket sends nothing
        own: str = probe.getsockname()[0]
        return own


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    return ip_address(address).is_loopback
