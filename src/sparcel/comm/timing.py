"""How long a simulated run would have taken: its trace, replayed on virtual clocks.

A trace says which messages each rank sent and waited for, in its program's order. Ranks do not see
clocks, so one run can be timed on any network.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparcel.errors import InputError


class Link(NamedTuple):
    """What a message takes: ``latency_s`` seconds, and one for every ``bandwidth`` bytes."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True)
class Network:
    """Nodes of ranks, joined by links; by default each rank is a node of its own.

    Rank r lives on node r // ranks_per_node. A port sends one message at a time and receives one
    at a time: each rank has one towards the others of its node, each node one towards the other
    nodes, which its ranks share.

    Parameters
    ----------
    latency_s, bandwidth
        The links between nodes: seconds a message, and bytes a second.
    ranks_per_node
        At least 1; the last node has fewer where the number of ranks is no multiple.
    node_latency_s, node_bandwidth
        The links inside a node.

    Raises
    ------
    InputError
        When one of them is out of its range.
    """

    latency_s: float = 0.0
    bandwidth: float = float("inf")
    ranks_per_node: int = 1
    node_latency_s: float = 0.0
    node_bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise InputError(f"ranks_per_node must be at least 1, got {self.ranks_per_node}")
        for name in ("latency_s", "node_latency_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} must be at least 0 seconds, got {getattr(self, name)}")
        for name in ("bandwidth", "node_bandwidth"):
            if not getattr(self, name) > 0:
                raise InputError(
                    f"{name} must be more than 0 bytes a second, got {getattr(self, name)};"
                    " leave it out for no limit"
                )

    @property
    def outer(self) -> Link:
        """The link that messages between nodes take."""
        return Link(self.latency_s, self.bandwidth)

    @property
    def inner(self) -> Link:
        """The link that messages inside a node take."""
        return Link(self.node_latency_s, self.node_bandwidth)


class Trace:
    """The messages of a run, numbered in the order in which they were sent.

    Parameters
    ----------
    ranks
        How many there are.
    """

    def __init__(self, ranks: int) -> None:
        self.sources, self.destinations = array("i"), array("i")
        self.nbytes = array("q")
        # By rank: 2·message where it was sent, 2·message + 1 where it was waited for.
        self.events = [array("q") for _ in range(ranks)]
        # By rank: seconds of work, by the number of events before it.
        self.work: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(ranks)]

    def add_work(self, rank: int, seconds: float) -> None:
        """Note that a rank worked until now."""
        self.work[rank][len(self.events[rank])] += seconds

    def send(self, source: int, destination: int, nbytes: int) -> int:
        """Note a message and return its number."""
        message = len(self.nbytes)
        self.sources.append(source)
        self.destinations.append(destination)
        self.nbytes.append(nbytes)
        self.events[source].append(2 * message)
        return message

    def receive(self, message: int) -> None:
        """Note that its destination waits for a message."""
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
            # Weights are float64, exact up to 2⁵³ bytes a rank.
            counts.append(np.bincount(ends, nbytes, minlength=ranks).astype(np.int64))
        return np.stack(counts)


@dataclass
class _Port:
    """When a port is free again, in seconds."""

    send_free: float = 0.0
    receive_free: float = 0.0


def seconds_of(trace: Trace, network: Network) -> float:
    """Return the time at which the slowest rank is done and the last message has left.

    Ranks take turns by their clocks, lower ranks first where those agree. So a shared port sends
    in the order of the clocks, and receives in the order in which messages were both sent and
    waited for.
    """
    return _Replay(trace, network).run()


class _Replay:
    """The clocks and ports, while a trace is replayed on a network."""

    def __init__(self, trace: Trace, network: Network) -> None:
        ranks = range(len(trace.events))
        self.trace = trace
        self.node = [rank // network.ranks_per_node for rank in ranks]
        self.links = (network.inner, network.outer)
        self.ports = ([_Port() for _ in ranks], [_Port() for _ in range(self.node[-1] + 1)])
        self.now = [0.0 for _ in ranks]
        self.place = [0 for _ in ranks]
        self.sent_from = array("d", [-1.0]) * len(trace.nbytes)  # negative until it was sent
        self.sent_until = array("d", self.sent_from)
        self.waiting: dict[int, float] = {}  # since when, by message
        self.turns: list[tuple[float, int]] = []

    def run(self) -> float:
        """Replay all and return the time at the end."""
        for rank in range(len(self.now)):
            self._plan(rank)
        while self.turns:
            time, rank = heapq.heappop(self.turns)
            message, waits = divmod(self.trace.events[rank][self.place[rank]], 2)
            self.place[rank] += 1
            self.now[rank] = self._receive(message, time) if waits else self._send(message, time)
            self._plan(rank)
        return max(*self.now, *(port.send_free for ports in self.ports for port in ports))

    def _plan(self, rank: int) -> None:
        """Let the rank work, and take its turn when its next message can be sent or received."""
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
        """Let the message leave, and its receiver take a turn; return the sender's clock."""
        source, destination, duration, outside = self._route(message)
        port = self.ports[outside][self.node[source] if outside else source]
        begin = max(time, port.send_free)
        port.send_free = begin + duration
        self.sent_from[message], self.sent_until[message] = begin, port.send_free
        if message in self.waiting:
            earliest = max(self.waiting.pop(message), begin)
            heapq.heappush(self.turns, (earliest, destination))
        return time

    def _receive(self, message: int, time: float) -> float:
        """Let the message arrive and return the receiver's clock."""
        _, destination, duration, outside = self._route(message)
        port = self.ports[outside][self.node[destination] if outside else destination]
        begin = max(self.sent_from[message], port.receive_free)
        port.receive_free = max(self.sent_until[message], begin + duration)
        return max(time, port.receive_free)

    def _route(self, message: int) -> tuple[int, int, float, bool]:
        """Return the ranks at both ends, the seconds on the link, and whether nodes differ."""
        trace = self.trace
        source, destination = trace.sources[message], trace.destinations[message]
        outside = self.node[source] != self.node[destination]
        link = self.links[outside]
        duration = link.latency_s + trace.nbytes[message] / link.bandwidth
        return source, destination, duration, outside
