"""Replays the trace of a simulated run on a network, to find out how long the run would take.

Ranks do not see clocks, so the trace of one run can be timed on any network.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass

from sparcel.comm.simulated.network import Network
from sparcel.comm.simulated.trace import Trace


@dataclass
class _Port:
    """The times at which a port is free again, in seconds."""

    send_free: float = 0.0
    receive_free: float = 0.0


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
        self.ports = ([_Port() for _ in ranks], [_Port() for _ in range(self.node[-1] + 1)])
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
        return max(*self.now, *(port.send_free for ports in self.ports for port in ports))

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
        port = self.ports[outside][self.node[source] if outside else source]
        begin = max(time, port.send_free)
        port.send_free = begin + duration
        self.sent_from[message], self.sent_until[message] = begin, port.send_free
        if message in self.waiting:
            earliest = max(self.waiting.pop(message), begin)
            heapq.heappush(self.turns, (earliest, destination))
        return time

    def _receive(self, message: int, time: float) -> float:
        """Receive the message and return the receiver's clock."""
        _, destination, duration, outside = self._route(message)
        port = self.ports[outside][self.node[destination] if outside else destination]
        begin = max(self.sent_from[message], port.receive_free)
        port.receive_free = max(self.sent_until[message], begin + duration)
        return max(time, port.receive_free)

    def _route(self, message: int) -> tuple[int, int, float, bool]:
        """Return source, destination, seconds at a port, and whether the nodes differ."""
        trace = self.trace
        source, destination = trace.sources[message], trace.destinations[message]
        outside = self.node[source] != self.node[destination]
        duration = self.network.message_seconds(trace.nbytes[message], outside)
        return source, destination, duration, outside
