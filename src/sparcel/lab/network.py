"""Networks on which to run distributed workers: emulated Ethernet, or plain loopback.

A network tells the address and the interface of each node, and how to run a command there.
"""

from __future__ import annotations

from sparcel.errors import InputError
from sparcel.lab.emulated import EmulatedNetwork, LabUnavailableError
from sparcel.lab.link import Link
from sparcel.lab.loopback import Loopback

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
