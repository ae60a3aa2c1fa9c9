"""The record of a simulated run: which messages each rank sent and waited for, in order."""

from __future__ import annotations

from array import array
from collections import defaultdict

import numpy as np


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
