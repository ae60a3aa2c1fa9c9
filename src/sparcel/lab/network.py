"""Networks to run distributed workers on: emulated Ethernet, or plain loopback.

A network says at which address a node is reached, through which interface, and how a command is
run there.
"""

from __future__ import annotations

from sparcel.errors import InputError
from sparcel.lab.emulated import EmulatedNetwork, LabUnavailableError
from sparcel.lab.link import Link
from sparcel.lab.loopback import Loopback

Network = EmulatedNetwork | Loopback

_MOST_NODES = 250  # so many descriptors fit in one message: 253, with the three shared namespaces


def open_network(nodes: int, link: Link | None) -> Network:
    """Build an emulated network, or fall back on loopback where that isn't possible.

    Parameters
    ----------
    nodes
        How many nodes, 1 to 250.
    link
        The link of each node; None asks for loopback.

    Returns
    -------
    EmulatedNetwork or Loopback
        To be closed, or used in a ``with`` statement. Its ``description`` says in one line what it
        is, and for a fallback why.

    Raises
    ------
    InputError
        When there can't be a network of so many nodes.
    """
    if not 1 <= nodes <= _MOST_NODES:
        raise InputError(f"a network has 1 to {_MOST_NODES} nodes, got {nodes}")
    if link is None:
        return Loopback(nodes)
    try:
        return EmulatedNetwork(nodes, link)
    except LabUnavailableError as error:
        return Loopback(nodes, reason=str(error))
