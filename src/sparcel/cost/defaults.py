"""Rates without measurement: from a few stated figures, or the defaults."""

from __future__ import annotations

from functools import lru_cache

from sparcel._checks import checked_number, checked_whole
from sparcel.cost.work import KINDS
from sparcel.rates import DENSE, TRANSFERS, Curve, Rates

_POSTING_SECONDS = 20e-6
"""Time that a rank spends on sending and receiving one of many simultaneous messages."""

_CORE_BYTES_PER_S = 10e9
"""The memory bandwidth of such a core."""


def stated_rates(
    *,
    bandwidth: float,
    latency_s: float,
    ranks: int,
    ranks_per_node: int = 1,
    node_bandwidth: float = 10e9,
    node_latency_s: float = 10e-6,
    memory_bandwidth: float = _CORE_BYTES_PER_S,
    description: str = "",
) -> Rates:
    """Return the rates of a cluster from a few stated figures.

    Parameters
    ----------
    bandwidth, latency_s
        A node's link to the other nodes: bytes a second in each direction, seconds a message.
    ranks, ranks_per_node
        Number of ranks. Consecutive ranks share a node and its link.
    node_bandwidth, node_latency_s
        Each rank's link to other ranks of its node, in the same units.
    memory_bandwidth
        Bytes a second of each rank's device. The times of work are scaled by it; the table holds
        those of one core with 10 GB/s.
    description
        What to call the rates; by default the bandwidth and latency of the slowest link that there
        is, "stated".
    """
    bandwidth = checked_number(bandwidth, "bandwidth", above=0)
    latency_s = checked_number(latency_s, "latency_s", at_least=0)
    ranks = checked_whole(ranks, "ranks", at_least=1)
    ranks_per_node = checked_whole(ranks_per_node, "ranks_per_node", at_least=1)
    node_bandwidth = checked_number(node_bandwidth, "node_bandwidth", above=0)
    node_latency_s = checked_number(node_latency_s, "node_latency_s", at_least=0)
    memory_bandwidth = checked_number(memory_bandwidth, "memory_bandwidth", above=0)
    here = min(ranks_per_node, ranks)
    slowest = (bandwidth, latency_s) if here < ranks else (node_bandwidth, node_latency_s)
    within = Curve.line(node_latency_s, 1 / node_bandwidth)
    between = within if here == ranks else Curve.line(latency_s, here / bandwidth)
    curves = {
        "shift": between,
        # In a tree, one rank of each node has a peer on another node.
        "tree": within if here == ranks else Curve.line(latency_s, 1 / bandwidth),
        **dict.fromkeys(("rotate", "gather"), _to_all(within, between, ranks, here)),
        **{f"node.{name}": within for name in TRANSFERS},
        **dict.fromkeys(DENSE, _engine(*slowest, ranks)),
    }
    for name, kind in KINDS.items():
        slower = 1.0 if name == "small" else _CORE_BYTES_PER_S / memory_bandwidth
        curves[name] = Curve.line(kind.call_s, kind.unit_s * slower)
    if not description:
        description = f"{8e-9 * slowest[0]:g} Gbit/s and {1e6 * slowest[1]:g} µs, stated"
    return Rates(curves, ranks, here, measured=False, description=description)


@lru_cache(maxsize=1)
def default_rates() -> Rates:
    """Return rates for an unknown cluster: Gloo on Ethernet of 1 Gbit/s and 100 µs."""
    return stated_rates(
        bandwidth=1e9 / 8, latency_s=100e-6, ranks=8, description="1 Gbit/s and 100 µs, assumed"
    )


def _to_all(within: Curve, between: Curve, ranks: int, here: int) -> Curve:
    """Return the time of one message when a rank sends one to every other rank at once.

    Most of the other ranks are on other nodes. All messages share one latency; each also costs
    `_POSTING_SECONDS`.
    """
    others = max(1, ranks - 1)
    inner = (here - 1) / others

    def at(nbytes: float) -> float:
        body = inner * (within(nbytes) - within(0)) + (1 - inner) * (between(nbytes) - between(0))
        latency = between(0) if here < ranks else within(0)
        return body + max(min(latency, _POSTING_SECONDS), latency / others)

    return Curve(((0.0, at(0)), (1e9, at(1e9))))


def _engine(bandwidth: float, latency_s: float, ranks: int) -> Curve:
    """Return a ring's time as a function of the vector's bytes; it uses each node's link once."""
    rounds, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    return Curve.line(rounds * latency_s, share / bandwidth)
