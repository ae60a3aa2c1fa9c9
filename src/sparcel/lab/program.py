"""Run a program on an emulated network as ``mpiexec`` or ``torchrun`` would, faults included."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sparcel.errors import InputError
from sparcel.lab.emulated import EmulatedNetwork
from sparcel.lab.launch import Ended, Job, Line

GRACE_S = 5.0
"""How long the other ranks may go on once one has failed, to raise and print their own errors."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong during a run, and when.

    Attributes
    ----------
    kill_node
        Whose processes are killed at once.
    cut_link
        Whose link carries nothing any more; neither end is told.
    after_s
        How long after the start, in seconds.
    """

    kill_node: int | None = None
    cut_link: int | None = None
    after_s: float = 0.0

    def check(self, nodes: int) -> None:
        """Raise InputError when a node is named that a network of so many hasn't."""
        for what, node in (("kill", self.kill_node), ("cut", self.cut_link)):
            if node is not None and not 0 <= node < nodes:
                raise InputError(f"can't {what} node {node}: the nodes are 0 to {nodes - 1}")


def run(
    network: EmulatedNetwork,
    argv: Sequence[str],
    ranks_per_node: int = 1,
    mpi: bool = False,
    faults: Faults | None = None,
) -> int:
    """Run a program on all nodes and pass on what it prints, each line after its rank.

    When a rank fails, the others have :data:`GRACE_S` to end by themselves, and are then killed.

    Parameters
    ----------
    network
        Where.
    argv, ranks_per_node, mpi
        As for :class:`~sparcel.lab.Job`.
    faults
        What to provoke.

    Returns
    -------
    int
        0, or the exit status of the rank that failed first, 128 + the number if by a signal. Ranks
        of a node that was killed on purpose don't count. 1 when no rank failed and a fault did not
        come about, since all ranks had ended before or it could not be provoked.

    Raises
    ------
    InputError
        When a fault names a node that isn't there.
    """
    faults = faults or Faults()
    faults.check(network.nodes)
    doomed: set[int] = set()
    failure: Ended | None = None
    unprovoked: str | None = None
    with contextlib.ExitStack() as timers, Job(network, argv, None, ranks_per_node, mpi) as job:

        def provoke() -> None:
            nonlocal unprovoked
            if faults.kill_node is not None:
                first = faults.kill_node * ranks_per_node
                doomed.update(range(first, first + ranks_per_node))
            try:
                _provoke(faults, network)
            except Exception as error:
                unprovoked = f"the fault could not be provoked: {error!r}"
            else:
                unprovoked = None

        if faults.kill_node is not None or faults.cut_link is not None:
            unprovoked = f"the ranks had ended before the fault was due, after {faults.after_s:g} s"
            timers.enter_context(_after(faults.after_s, provoke))
        for event in job.events():
            if isinstance(event, Line):
                _pass_on(event)
            elif event.status != 0 and event.rank not in doomed and failure is None:
                failure = event
                _say(f"rank {event.rank} failed: {_how(event.status)}")
                timers.enter_context(_after(GRACE_S, job.close))
        if mpi and not job.started_mpi:
            _say("no rank became an MPI rank: --mpi serves MPICH and other MPIs that speak PMI-1")
    if unprovoked is not None:
        _say(unprovoked)
    if failure is None:
        return 0 if unprovoked is None else 1
    return failure.status if failure.status > 0 else 128 - failure.status


def _provoke(faults: Faults, network: EmulatedNetwork) -> None:
    if faults.cut_link is not None:
        _say(f"the link of node {faults.cut_link} is cut")
        network.cut_link(faults.cut_link)
    if faults.kill_node is not None:
        _say(f"node {faults.kill_node} is killed")
        network.kill_node(faults.kill_node)


@contextlib.contextmanager
def _after(seconds: float, do: Callable[[], None]) -> Iterator[None]:
    """Do something later, unless the block ends first."""
    timer = threading.Timer(seconds, do)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _pass_on(line: Line) -> None:
    stream = sys.stderr if line.is_error else sys.stdout
    stream.write(f"[{line.rank}] {line.text}\n")
    stream.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"sparcel: {text}\n")
