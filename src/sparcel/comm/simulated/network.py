"""The network on which the trace of a simulated run is timed."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel._checks import checked_number, checked_whole


@dataclass(frozen=True)
class Network:
    """Nodes of ranks, connected by a network; by default every rank is a node of its own.

    Rank r lives on node r // ranks_per_node. A port sends one message at a time and receives one
    at a time. Every rank has a port to the other ranks of its node. Every node has one port to the
    other nodes, which its ranks share.

    Parameters
    ----------
    latency_s, bandwidth
        Seconds per message and bytes per second between nodes.
    ranks_per_node
        At least 1; the last node has fewer ranks if the number of ranks is not a multiple.
    node_latency_s, node_bandwidth
        Seconds per message and bytes per second inside a node.

    Raises
    ------
    InputError
        When a parameter is out of its range.
    """

    latency_s: float = 0.0
    bandwidth: float = float("inf")
    ranks_per_node: int = 1
    node_latency_s: float = 0.0
    node_bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        checked_whole(self.ranks_per_node, "ranks_per_node", at_least=1)
        for name in ("latency_s", "node_latency_s"):
            checked_number(getattr(self, name), name, at_least=0, hint="it is in seconds")
        for name in ("bandwidth", "node_bandwidth"):
            unit = "it is in bytes a second; leave it out for no limit"
            checked_number(getattr(self, name), name, above=0, hint=unit)

    def message_seconds(self, nbytes: int, between_nodes: bool) -> float:
        """Return how long a message occupies a port, between nodes or inside one."""
        if between_nodes:
            return self.latency_s + nbytes / self.bandwidth
        return self.node_latency_s + nbytes / self.node_bandwidth
