"""Starts the processes of one program on all nodes of a network, and tells which failed first.

A rank that fails takes the others along. They may end before it does, because a process that fails
may have more to tidy up. So the order in which ranks end does not tell, but what they wrote does: a
rank that ends by sparcel's `CommunicationError` survived the failure of another, whose cause the
error tells.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import IO

from sparcel.errors import CommunicationError, InputError, SparcelError
from sparcel.tools.lab.network import Network
from sparcel.tools.lab.pmi import PmiServer

_OUTPUT_S = 1.0  # how long to read after a process ended; its child may hold the pipe open for ever
_UCX = {
    "UCX_TLS": "tcp,self",
    # Send large messages eagerly in large segments: MPICH's all-reduce of 64 MB on 8 nodes took
    # 1.1 s so, and 2.0 s with UCX's defaults (8 KB segments after a handshake).
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_RNDV_THRESH": "inf",
}
"""Defaults for the variables of MPICH's transport, UCX."""


_WAKE_S = 0.5
"""How often to wake up while waiting for the ranks: a signal does not interrupt a wait that begins
just after it came."""

GRACE_S = 5.0
"""How long the other ranks may run after one has failed, to raise and print their own errors."""


class Workers(AbstractContextManager["Workers"]):
    """The processes of one distributed program; rank r runs on node r // ranks_per_node.

    The environment of each process has the variables that torchrun sets (``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``, ``NODE_RANK``, ``MASTER_ADDR``,
    ``MASTER_PORT``). ``GLOO_SOCKET_IFNAME`` names the interface of the node, and
    ``OMP_NUM_THREADS`` is 1 unless it is set already. For benchmarks there are
    ``SPARCEL_LAB_DESCRIPTION``, ``SPARCEL_LAB_NODES``, ``SPARCEL_LAB_RANKS_PER_NODE`` and
    ``SPARCEL_LAB_RATE_BITS_PER_S``, which is empty if the rate is not limited.

    Parameters
    ----------
    network
        Where to run; it must outlive the workers.
    argv
        The command, the same on all nodes.
    environment
        Further variables to set.
    ranks_per_node
        Number of processes on each node, at least 1.
    mpi
        Whether to make the processes ranks of ``MPI_COMM_WORLD`` too, as ``mpiexec`` would, for
        MPICH or another MPI that uses PMI-1. The default variables make UCX use TCP with large
        segments and, on an emulated network, the node's interface.

    Raises
    ------
    InputError
        When ``ranks_per_node`` is below 1.
    """

    def __init__(
        self,
        network: Network,
        argv: Sequence[str],
        environment: Mapping[str, str] | None = None,
        ranks_per_node: int = 1,
        mpi: bool = False,
    ) -> None:
        if ranks_per_node < 1:
            raise InputError(f"a node runs at least 1 rank, got ranks_per_node={ranks_per_node}")
        self._network, self._ranks_per_node = network, ranks_per_node
        self._events: queue.SimpleQueue[Line | Ended] = queue.SimpleQueue()
        # On loopback all ranks are on one machine, where MPI needs no network.
        nodes = 1 if network.link is None else network.nodes
        self._pmi = PmiServer(nodes, network.nodes * ranks_per_node // nodes) if mpi else None
        self._grace: threading.Timer | None = None
        self._closed = False
        self.processes: list[subprocess.Popen[str]] = []
        shared = self._shared_environment(environment or {})
        try:
            for rank in range(network.nodes * ranks_per_node):
                self._start(rank, argv, {**shared, **self._own_environment(rank)})
        except BaseException:
            self.close()
            raise

    @property
    def started_mpi(self) -> bool:
        """Whether any process has started MPI."""
        return self._pmi is not None and self._pmi.used

    def _shared_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        network = self._network
        rate = str(network.link.rate_bits_per_s) if network.link else ""
        mpi = dict(_UCX) if self._pmi else {}
        # On loopback leave the choice to UCX, which refuses loopback as its only interface.
        if self._pmi and network.link is not None:
            mpi["UCX_NET_DEVICES"] = network.interface
        return {
            "OMP_NUM_THREADS": "1",
            **mpi,
            **os.environ,
            "WORLD_SIZE": str(network.nodes * self._ranks_per_node),
            "LOCAL_WORLD_SIZE": str(self._ranks_per_node),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(network.free_port()),
            "GLOO_SOCKET_IFNAME": network.interface,
            "SPARCEL_LAB_DESCRIPTION": network.description,
            "SPARCEL_LAB_NODES": str(network.nodes),
            "SPARCEL_LAB_RANKS_PER_NODE": str(self._ranks_per_node),
            "SPARCEL_LAB_RATE_BITS_PER_S": rate,
            **environment,
        }

    def _own_environment(self, rank: int) -> dict[str, str]:
        node, local_rank = divmod(rank, self._ranks_per_node)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(node),
            "NODE_RANK": str(node),
            **(self._pmi.environment(rank) if self._pmi else {}),
        }

    def _start(self, rank: int, argv: Sequence[str], environment: dict[str, str]) -> None:
        inherited = (self._pmi.descriptor(rank),) if self._pmi else ()
        process = subprocess.Popen(
            self._network.command(rank // self._ranks_per_node, argv),
            env=environment,
            pass_fds=(*self._network.descriptors, *inherited),
            stdin=subprocess.PIPE,  # never written; the guard takes its closing for our death
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the workers
        )
        self.processes.append(process)
        if self._pmi:
            self._pmi.started(rank)
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(rank, pipe, is_error), daemon=True)
            for pipe, is_error in ((process.stdout, False), (process.stderr, True))
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(rank, process, readers), daemon=True).start()

    def _read(self, rank: int, pipe: IO[str], is_error: bool) -> None:
        for line in pipe:
            self._events.put(Line(rank, line.rstrip("\n"), is_error))

    def _wait(
        self, rank: int, process: subprocess.Popen[str], readers: list[threading.Thread]
    ) -> None:
        try:
            # Not reaped, so that the number stays that of the group, which `close` kills.
            end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # somebody has asked for the status, which reaps
            end = None
        if end is None:
            status = process.wait()
        else:
            status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        killed = self._closed
        for reader in readers:
            reader.join(_OUTPUT_S)
        self._events.put(Ended(rank, status, killed))

    def events(self) -> Iterator[Line | Ended]:
        """Yield the lines and the ends of the ranks as they come, until all have ended."""
        running = len(self.processes)
        while running:
            try:
                event = self._events.get(timeout=_WAKE_S)
            except queue.Empty:  # a signal that came just before the wait is handled now
                continue
            running -= isinstance(event, Ended)
            yield event

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (rank, line) for each line on standard output, until all ranks have ended.

        Raises
        ------
        WorkerFailedError
            As soon as a rank ends with an error. If it survived the failure of another rank, the
            other ranks have 5 seconds to end as well. `close` ends those that run on.
        """
        failures = Failures()
        for event in self.events():
            failures.note(event)
            first = failures.first
            if first is not None:
                if not first.survived:
                    break
                self.close_soon()
            elif isinstance(event, Line) and not event.is_error:
                yield event.rank, event.text
        if failures.first is not None:
            raise failures.first

    def close_soon(self) -> None:
        """Kill all processes that still run after 5 seconds; only the first call counts."""
        if self._grace is None:
            self._grace = threading.Timer(GRACE_S, self.close)
            self._grace.start()

    def close(self) -> None:
        """Kill all processes that still run, and what the ended ones left in their groups."""
        self._closed = True
        if self._grace is not None:
            self._grace.cancel()
        for process in self.processes:
            with suppress(ProcessLookupError):
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        if self._pmi:
            self._pmi.close()

    def __exit__(self, *error: object) -> None:
        self.close()


_KEPT_LINES = 60

_SURVIVED = re.compile(r"\bCommunicationError: (.*)")

_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ")
"""What torch puts before each line of an exception while there is a process group."""


@dataclass(frozen=True)
class Line:
    """A line that a rank wrote to standard error or to standard output."""

    rank: int
    text: str
    is_error: bool


@dataclass(frozen=True)
class Ended:
    """The end of a rank's process.

    Attributes
    ----------
    status
        Its exit status, negative for a signal.
    killed
        Whether it ended because all workers are being closed.
    """

    rank: int
    status: int
    killed: bool = False


class WorkerFailedError(SparcelError):
    """A worker ended with an error.

    Attributes
    ----------
    rank
        The rank of the worker that failed first; a survivor's if that worker had not ended yet.
    status
        Its exit status; the negative number of the signal if one killed it.
    output
        The last lines of its standard error.
    """

    def __init__(self, rank: int, status: int, output: str) -> None:
        self.rank, self.status, self.output = rank, status, output
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        last = output.strip().splitlines()[-1:]
        cause = f": {last[0]}" if last else ""
        super().__init__(_cause(output) or f"rank {rank} failed ({how}){cause}")

    @property
    def survived(self) -> bool:
        """Whether the worker failed because another one did."""
        return _cause(self.output) is not None


class Failures:
    """The ranks that ended with an error, and what they wrote before."""

    def __init__(self) -> None:
        self._errors: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT_LINES))
        self._causes: dict[int, str] = {}
        self._found: list[WorkerFailedError] = []

    def note(self, event: Line | Ended) -> None:
        """Note a line on standard error, or the end of a rank."""
        if isinstance(event, Ended):
            if event.status != 0 and not event.killed:
                lines, cause = list(self._errors[event.rank]), self._causes.get(event.rank)
                if cause is not None and cause not in lines:  # much was written after it
                    lines.insert(0, cause)
                output = "\n".join(lines)
                self._found.append(WorkerFailedError(event.rank, event.status, output))
        elif event.is_error:
            text = _TORCHS_PREFIX.sub("", event.text)
            self._errors[event.rank].append(text)
            if _SURVIVED.search(text):
                self._causes[event.rank] = text

    @property
    def first(self) -> WorkerFailedError | None:
        """The first failure; that of a survivor only as long as there is no other."""
        return min(self._found, key=lambda failure: failure.survived, default=None)


def told_by_survivor(error: CommunicationError) -> str:
    """Return the line with which a program ends on a rank that survived another rank's failure.

    `_SURVIVED` recognises it.
    """
    return f"sparcel: CommunicationError: {error}"


def _cause(output: str) -> str | None:
    """Return the text of the last `CommunicationError` in a worker's output."""
    found = _SURVIVED.findall(output)
    return str(found[-1]) if found else None
