"""Run one worker on each node of a network, as one job that ends as a whole."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Self

from sparcel.errors import SparcelError
from sparcel.lab.network import Network

_KEPT_LINES = 60


class WorkerFailedError(SparcelError):
    """A worker ended with an error.

    Attributes
    ----------
    rank
        Whose worker was the first to fail.
    status
        Its exit status; negative for a signal.
    output
        The last lines of its standard error.
    """

    def __init__(self, rank: int, status: int, output: str) -> None:
        self.rank, self.status, self.output = rank, status, output
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        last = output.strip().splitlines()[-1:] or ["it wrote nothing to standard error"]
        super().__init__(f"the worker of rank {rank} failed ({how}): {last[0]}")


class Job:
    """The processes of one distributed program, rank r on node r.

    Each gets torch.distributed's variables in its environment (``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR``, ``MASTER_PORT``; ``LOCAL_RANK`` 0) and ``GLOO_SOCKET_IFNAME``, the interface of
    its node. Standard error is kept and told when a worker fails.

    Parameters
    ----------
    network
        Where to run; it must outlive the job.
    argv
        The command, the same on all nodes.
    environment
        Variables to set besides.
    """

    def __init__(
        self, network: Network, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._errors = [deque[str](maxlen=_KEPT_LINES) for _ in range(network.nodes)]
        self._error_readers: list[threading.Thread] = []
        self.processes: list[subprocess.Popen[str]] = []
        shared = {
            **os.environ,
            "WORLD_SIZE": str(network.nodes),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(network.free_port()),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": network.interface,
            **(environment or {}),
        }
        try:
            for rank in range(network.nodes):
                self._start(network, rank, argv, {**shared, "RANK": str(rank)})
        except BaseException:
            self.close()
            raise

    def _start(
        self, network: Network, rank: int, argv: Sequence[str], environment: dict[str, str]
    ) -> None:
        process = subprocess.Popen(
            network.command(rank, argv),
            env=environment,
            pass_fds=network.descriptors,
            stdin=subprocess.PIPE,  # held open, never written: a guard takes its end for ours
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C is for us, who then end the workers
        )
        self.processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        threading.Thread(target=self._read, args=(rank, process.stdout), daemon=True).start()
        reader = threading.Thread(target=self._errors[rank].extend, args=(process.stderr,))
        reader.daemon = True
        reader.start()
        self._error_readers.append(reader)

    def _read(self, rank: int, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines.put((rank, line.rstrip("\n")))
        self._lines.put((rank, None))

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield what the workers print as (rank, line), until all have ended.

        Raises
        ------
        WorkerFailedError
            As soon as one ends with an error. The others are left to :meth:`close`.
        """
        running = len(self.processes)
        while running:
            rank, line = self._lines.get()
            if line is not None:
                yield rank, line
                continue
            running -= 1
            status = self.processes[rank].wait()
            if status != 0:
                self._error_readers[rank].join()
                raise WorkerFailedError(rank, status, "".join(self._errors[rank]))

    def close(self) -> None:
        """End all workers that still run, at once."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
