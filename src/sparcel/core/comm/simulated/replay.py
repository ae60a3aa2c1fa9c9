"""The record of a simulated run, and the time that it takes on a network.

Ranks do not see clocks, so the trace of one run can be timed on any network.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from sparcel.core._checks import checked_number, checked_whole


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


class Trace:
    """The messages of a run, numbered in the order in which they were sent.

    Parameters
    ----------
    ranks
        Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.sources, self.destinations = array("i"), array("i")
        self.nbytes = array("q")
        # By rank: 2·message when the rank sent it, 2·message + 1 when the rank waited for it.
        self.events = [array("q") for _ in range(ranks)]
        # By rank: seconds of work, by the number of events before it.
        self.work: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(ranks)]

    def add_work(self, rank: int, seconds: float) -> None:
        """Record that a rank has worked since its last event."""
        self.work[rank][len(self.events[rank])] += seconds

    def send(self, source: int, destination: int, nbytes: int) -> int:
        """Record that a message was sent; return its number."""
        message = len(self.nbytes)
        self.sources.append(source)
        self.destinations.append(destination)
        self.nbytes.append(nbytes)
        self.events[source].append(2 * message)
        return message

    def receive(self, message: int) -> None:
        """Record that the destination of a message waits for it."""
        self.events[self.destinations[message]].append(2 * message + 1)

    def between_nodes(self, ranks_per_node: int) -> np.ndarray:
        """Return messages sent, bytes sent, messages received and bytes received, ``[4, P]``.

        Only messages from one node to another count.
        """
        sources, destinations = np.array(self.sources), np.array(self.destinations)
        outer = sources // ranks_per_node != destinations // ranks_per_node
        nbytes, ranks = np.array(self.nbytes)[outer], len(self.events)
        counts = []
        for ends in (sources[outer], destinations[outer]):
            counts.append(np.bincount(ends, minlength=ranks))
            # The weights are float64, which is exact up to 2⁵³ bytes a rank.
            counts.append(np.bincount(ends, nbytes, minlength=ranks).astype(np.int64))
        return np.stack(counts)


def seconds_of(trace: Trace, network: Network) -> float:
    """Return the time at which the slowest rank is done and the last message has left.

    The rank with the earliest clock goes first, and the lower rank on a tie. So a shared port sends
    in the order of the clocks. It receives a message once the message has been sent and its
    receiver waits for it, in the order of these times.
    """
    return _Replay(trace, network).run()


class _Replay:
    """The clocks and ports during the replay of a trace on a network."""

    def __init__(self, trace: Trace, network: Network) -> None:
        ranks = range(len(trace.events))
        self.trace, self.network = trace, network
        self.node = [rank // network.ranks_per_node for rank in ranks]
        # When the ports of ranks, and those of nodes, can send and receive again.
        ports = len(ranks), self.node[-1] + 1
        self.send_free, self.receive_free = ([[0.0] * n for n in ports] for _ in range(2))
        self.now = [0.0 for _ in ranks]
        self.place = [0 for _ in ranks]
        self.sent_from = array("d", [-1.0]) * len(trace.nbytes)  # negative: not sent yet
        self.sent_until = array("d", self.sent_from)
        self.waiting: dict[int, float] = {}  # when the wait began, by message
        self.turns: list[tuple[float, int]] = []

    def run(self) -> float:
        """Replay the whole trace and return the time at its end."""
        for rank in range(len(self.now)):
            self._plan(rank)
        while self.turns:
            time, rank = heapq.heappop(self.turns)
            message, waits = divmod(self.trace.events[rank][self.place[rank]], 2)
            self.place[rank] += 1
            self.now[rank] = self._receive(message, time) if waits else self._send(message, time)
            self._plan(rank)
        return max(*self.now, *self.send_free[0], *self.send_free[1])

    def _plan(self, rank: int) -> None:
        """Add the rank's work, and queue its turn for when its next event can happen."""
        place, events = self.place[rank], self.trace.events[rank]
        time = self.now[rank] + self.trace.work[rank].get(place, 0.0)
        if place == len(events):
            self.now[rank] = time
            return
        message, waits = divmod(events[place], 2)
        if waits and self.sent_from[message] < 0:
            self.waiting[message] = time
        else:
            earliest = max(time, self.sent_from[message]) if waits else time
            heapq.heappush(self.turns, (earliest, rank))

    def _send(self, message: int, time: float) -> float:
        """Send the message, queue its waiting receiver, and return the sender's clock."""
        source, destination, duration, outside = self._route(message)
        free, port = self.send_free[outside], self.node[source] if outside else source
        begin = max(time, free[port])
        free[port] = begin + duration
        self.sent_from[message], self.sent_until[message] = begin, free[port]
        if message in self.waiting:
            earliest = max(self.waiting.pop(message), begin)
            heapq.heappush(self.turns, (earliest, destination))
        return time

    def _receive(self, message: int, time: float) -> float:
        """Receive the message and return the receiver's clock."""
        _, destination, duration, outside = self._route(message)
        free, port = self.receive_free[outside], self.node[destination] if outside else destination
        begin = max(self.sent_from[message], free[port])
        free[port] = max(self.sent_until[message], begin + duration)
        return max(time, free[port])

    def _route(self, message: int) -> tuple[int, int, float, bool]:
        """Return source, destination, seconds at a port, and whether the nodes differ."""
        trace = self.trace
        source, destination = trace.sources[message], trace.destinations[message]
        outside = self.node[source] != self.node[destination]
        duration = self.network.message_seconds(trace.nbytes[message], outside)
        return source, destination, duration, outside
