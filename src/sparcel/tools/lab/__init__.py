"""A cluster on one machine: nodes joined by emulated Ethernet, and workers that run on them.

Everything runs in anonymous namespaces. They vanish with the process that made them, so nothing is
left behind however that process ends. No traffic leaves the machine.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from sparcel.errors import InputError
from sparcel.tools.lab.launch import (
    Ended,
    Failures,
    Line,
    WorkerFailedError,
    Workers,
    told_by_survivor,
)
from sparcel.tools.lab.network import (
    EmulatedNetwork,
    LabUnavailableError,
    Link,
    LinkBytes,
    Loopback,
    Network,
    link_bytes,
    open_network,
    parse_link,
    parse_rate,
)


@dataclass(frozen=True)
class Faults:
    """Faults to cause during a run.

    Attributes
    ----------
    kill_node
        The node whose processes are all killed.
    cut_link
        The node whose link stops carrying packets; neither end is told.
    after_s
        Seconds from the start of the run to the faults.
    """

    kill_node: int | None = None
    cut_link: int | None = None
    after_s: float = 0.0

    @property
    def any(self) -> bool:
        """Whether there is a fault to cause."""
        return self.kill_node is not None or self.cut_link is not None

    def check(self, nodes: int) -> None:
        """Raise InputError when a fault names a node outside a network of ``nodes`` nodes."""
        for what, node in (("kill", self.kill_node), ("cut", self.cut_link)):
            if node is not None and not 0 <= node < nodes:
                raise InputError(f"cannot {what} node {node}: the nodes are 0 to {nodes - 1}")


def run(
    network: Network,
    argv: Sequence[str],
    ranks_per_node: int = 1,
    mpi: bool = False,
    faults: Faults | None = None,
) -> int:
    """Run a program on all nodes and print its lines, each after its rank.

    When a rank fails, the others have 5 seconds to end by themselves; then they
    are killed. At the end, the rank that failed first is named, with the cause.

    Parameters
    ----------
    network
        Where to run.
    argv, ranks_per_node, mpi
        As for :class:`~sparcel.lab.Workers`.
    faults
        Faults to cause; None for no faults.

    Returns
    -------
    int
        0, or the exit status of the rank that failed first, 128 + the number of the signal if one
        killed it. Ranks of a node that was killed on purpose do not count. 1 when no rank failed
        but a fault could not be caused, or all ranks had ended before it was due.

    Raises
    ------
    InputError
        When a fault names a node that is not on the network, or the network is not emulated.
    """
    faults = faults or Faults()
    faults.check(network.nodes)
    if faults.any and not isinstance(network, EmulatedNetwork):
        raise InputError(
            f"faults need an emulated network, got {network.description}; give a --rate, and leave"
            " out --or-loopback"
        )
    failures = Failures()
    with (
        Workers(network, argv, None, ranks_per_node, mpi) as workers,
        _Causing(faults, network) as causing,
    ):
        for event in workers.events():
            if isinstance(event, Line):
                _print(event)
            if isinstance(event, Line) or event.rank // ranks_per_node != causing.killed:
                failures.note(event)
            if failures.first is not None:
                workers.close_soon()
        if mpi and not workers.started_mpi:
            _say("no rank became an MPI rank: --mpi serves MPICH and other MPIs that use PMI-1")
    if causing.problem is not None:
        _say(causing.problem)
    failure = failures.first
    if failure is None:
        return 0 if causing.problem is None else 1
    _say(str(failure))
    return failure.status if failure.status > 0 else 128 - failure.status


class _Causing(threading.Timer):
    """Causes faults when they are due, if that is while it is entered.

    ``problem`` says why they were not caused; ``killed`` is the node that is, or is about to be.
    """

    def __init__(self, faults: Faults, network: Network) -> None:
        super().__init__(faults.after_s, self._cause)
        self._faults, self._network = faults, network
        self.killed: int | None = None
        self.problem: str | None = None

    def __enter__(self) -> Self:
        if self._faults.any:
            after_s = self._faults.after_s
            self.problem = f"the ranks had ended before the fault was due, after {after_s:g} s"
            self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()
        if self._faults.any:
            self.join()

    def _cause(self) -> None:
        faults, network = self._faults, self._network
        assert isinstance(network, EmulatedNetwork), "run refuses others"
        self.killed = faults.kill_node
        try:
            if faults.cut_link is not None:
                _say(f"the link of node {faults.cut_link} is cut")
                network.cut_link(faults.cut_link)
            if faults.kill_node is not None:
                _say(f"node {faults.kill_node} is killed")
                network.kill_node(faults.kill_node)
        except Exception as error:
            self.problem = f"the fault could not be caused: {error!r}"
        else:
            self.problem = None


def _print(line: Line) -> None:
    stream = sys.stderr if line.is_error else sys.stdout
    stream.write(f"[{line.rank}] {line.text}\n")
    stream.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"sparcel: {text}\n")


__all__ = [
    "EmulatedNetwork",
    "Ended",
    "Faults",
    "LabUnavailableError",
    "Line",
    "Link",
    "LinkBytes",
    "Loopback",
    "Network",
    "WorkerFailedError",
    "Workers",
    "link_bytes",
    "open_network",
    "parse_link",
    "parse_rate",
    "run",
    "told_by_survivor",
]
