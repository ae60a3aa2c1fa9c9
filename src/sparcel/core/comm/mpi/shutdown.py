"""How MPI ranks finish with a communicator, and how their processes exit after a failure.

MPI_Finalize waits for all processes of the world. After a failure it can therefore hang, or end the
process with a status of its own. A process cannot skip it alone, since the others would wait for
it: all ranks of the failed communicator must skip it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpi4py import MPI
from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from sparcel.core.comm.executor import Executor, at_exit
from sparcel.core.comm.failure import STORE_SECONDS, Failure, answer_within, wait_until

_LINGER_SECONDS = 1.0
"""How long a process that exits after a failure stays, since others may read its store."""


class MpiFailure(Failure):
    """The failure state of MPI ranks.

    Parameters
    ----------
    store, size
        As for `Failure`.
    comms
        MPI communicators to free once all ranks have finished. After a failure they are never
        freed: MPI would reuse their context number, for which unreceived messages may be waiting.
    timeout
        Seconds to wait for the other ranks when the process exits.
    hosts_store
        Whether this process hosts the store.
    """

    def __init__(
        self, store: Store, size: int, comms: list[MPI.Intracomm], timeout: float, hosts_store: bool
    ) -> None:
        super().__init__(store, size)
        self._comms, self._timeout, self._hosts_store = comms, timeout, hosts_store
        self.finished: bool | None = None
        """Whether all ranks finished within the time given; None before `finish`."""

    @override
    def finish(self, patience: float) -> bool:
        self.finished = super().finish(patience)
        if self.finished:
            self._acknowledge()
            for comm in self._comms:
                if comm != MPI.COMM_NULL and not MPI.Is_finalized():
                    with suppress(MPI.Exception):  # wastes a context number, but is no failure
                        comm.Free()
        return self.finished

    def ended_well(self) -> bool:
        """Return whether all ranks finished; called when the process exits.

        A rank that finishes early waits here for slower ranks, as it would in MPI_Finalize.
        """
        if self.finished:
            return True
        if self.finished is False:
            self.finished = answer_within(self._wait_for_others, self._timeout)
        if self.finished:
            self._acknowledge()
        else:
            answer_within(lambda: self._store.set("failed", ""), STORE_SECONDS)
        return bool(self.finished)

    def _finish(self, patience: float) -> bool:
        return super()._finish(patience) and not self._failed()

    def _wait_for_others(self) -> bool:
        """Wait until all ranks have finished, or one has failed."""
        ended = wait_until(lambda: self._failed() or self._all_done(), self._timeout)
        return ended and not self._failed()

    def _failed(self) -> bool:
        return bool(self._store.check(["failed"]))

    def _acknowledge(self) -> None:
        """Announce that this rank knows that all have finished.

        The process that hosts the store stays until all ranks have announced it.
        """

        def acknowledge() -> None:
            self._store.add("acknowledged", 1)
            if self._hosts_store:
                everyone = self._size
                wait_until(lambda: self._store.add("acknowledged", 0) == everyone, STORE_SECONDS)

        answer_within(acknowledge, STORE_SECONDS)


class _ExitPolicy:
    """What this process does when the interpreter exits."""

    def __init__(self) -> None:
        # The status with which to end after a failure; None leaves the end to MPI_Finalize.
        self.status: int | None = None
        # Failure states that matter at exit; those of closed communicators are dropped.
        self.watched: dict[MpiFailure, Executor] = {}
        # Those with jobs that failed before the program ended, which its status takes into account.
        self.seen: set[MpiFailure] = set()

    def end(self, status: int) -> None:
        """Note the status with which the program ends."""
        self.status, self.seen = status, self._with_failed_jobs()

    def _with_failed_jobs(self) -> set[MpiFailure]:
        return {failure for failure, executor in self.watched.items() if executor.job_failed}

    def __call__(self) -> None:
        """Wait for the other ranks; after a failure, end the process if that was asked for."""
        failed = [failure for failure in self.watched if not failure.ended_well()]
        if not failed or MPI.Is_finalized():
            return
        time.sleep(_LINGER_SECONDS)
        if self.status is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # closed, missing, or a broken pipe
                stream.flush()
        os._exit(self.status or int(self._with_failed_jobs() > self.seen))


_policy = _ExitPolicy()
at_exit.append(_policy)


def watch_at_exit(failure: MpiFailure, executor: Executor) -> None:
    """Check this failure state, and the jobs of its executor, when the interpreter exits."""
    _policy.watched = {
        known: jobs
        for known, jobs in _policy.watched.items()
        if known.cause is None and not known.finished
    }
    _policy.watched[failure] = executor


@contextmanager
def exit_after_failure() -> Iterator[None]:
    """Let a process end with its program's status, also after a failed exchange over MPI.

    Otherwise mpi4py calls MPI_Finalize when the interpreter exits. If a process died, MPI_Finalize
    may then abort the others, or wait for ever. All ranks run their whole program in this context::

        with sparcel.comm.mpi.exit_after_failure():
            sys.exit(main())

    Every process of a failed communicator then skips MPI_Finalize. It runs the ``atexit`` handlers
    that were registered after sparcel was imported, flushes standard output and standard error, and
    ends by ``os._exit`` with the program's status: that of its SystemExit, 1 for another exception,
    else 0; but 1 if a job fails that is still under way then. Processes whose communicators did not
    fail exit as usual.
    """
    _policy.status = 1  # the interpreter does not tell its handlers with which status it exits
    try:
        yield
    except SystemExit as end:
        _policy.end(_status_of(end))
        raise
    _policy.end(0)


def _status_of(end: SystemExit) -> int:
    """Return the exit status that the interpreter makes of SystemExit."""
    if end.code is None:
        return 0
    return end.code & 0xFF if isinstance(end.code, int) else 1
