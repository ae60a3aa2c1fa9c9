"""Runs the jobs of a communicator and of all communicators split from it, until one fails."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import TypeVar

from sparcel.core.comm.calls import Calls, differences
from sparcel.core.comm.engine import SAME_CALLS, Engine, LostPeerError
from sparcel.core.comm.failure import Cause, Failure, wait_until
from sparcel.core.comm.jobs import Job, JobQueue
from sparcel.errors import CommunicationError, MismatchError

T = TypeVar("T")

_CAUSE_SECONDS = 0.5
"""How long a rank that saw a connection close waits for another rank to publish the cause."""

_CALL_SECONDS = 1.0
"""How long ranks that disagree wait for one another's calls, to name them in their errors."""

_FINISH_SECONDS = 2.0
"""How long a closing rank waits for the other ranks to finish what is under way."""

_FAILED_SECONDS = 0.2
"""How long it waits for that if an error ended its program, since they may wait for it in vain."""

_EXIT_SECONDS = 5.0
"""How long jobs may go on when the interpreter exits with an open communicator."""

_MONITOR_SECONDS = 1.0
"""How often to check a job; a job that takes less time is never checked."""


class Executor:
    """Runs jobs one at a time. When a job raises on one rank, the executors of all ranks fail.

    Parameters
    ----------
    me
        The number by which other ranks name this process.
    failure
        The failure state that the ranks share.

    Attributes
    ----------
    job_failed
        Whether a job of this process has raised.
    uncaught
        The error that ended the program, if one did; None before the interpreter exits.
    calls
        What this process called, on any of the communicators.
    """

    def __init__(self, me: int, failure: Failure) -> None:
        self.me, self.failure = me, failure
        self.calls = Calls()
        self.queue = JobQueue("sparcel")
        self.engines: list[Engine] = []
        self.job_failed = False
        self.uncaught: BaseException | None = None
        self._released: deque[tuple[Engine, Failure]] = deque()
        _alive.add(self)
        _start_monitor()

    def run(self, job: Callable[[], T]) -> T:
        """Run a job in its turn and return its result."""
        return self.queue.run(partial(self._perform, job))

    def submit(self, job: Callable[[], T]) -> Job[T]:
        """Queue a job and return at once."""
        return self.queue.submit(partial(self._perform, job))

    def abort(self, cause: Cause, patience: float = 0.0) -> Cause:
        """Publish the cause of a failure and close all connections; return the first cause.

        See `Failure.publish` for ``patience``.
        """
        first = self.failure.publish(cause, patience)
        for engine in list(self.engines):
            engine.abort()
        return first

    def disconnect(self, engine: Engine, failure: Failure) -> None:
        """Close the connections of one communicator, as a job.

        Ranks that still use the communicator after a while fail. If it is the first one, from which
        all others were split, the others fail as well.
        """
        # The last messages may still be under way, and closing a connection would drop them.
        patience = _FINISH_SECONDS if self.uncaught is None else _FAILED_SECONDS
        wait_until(self._is_idle, patience)  # a job on a GPU ends before its transfers do
        finished = self.failure.cause is not None or failure.finish(patience)
        if not finished and failure is self.failure:
            closed = Cause(
                f"rank {self.me} closed its communicator before the others: it ended, or closed its"
                " handle; its own output tells why"
            )
            self.abort(closed if self.uncaught is None else self._failed(self.uncaught))
        self._drop(engine)

    def release(self, engine: Engine, failure: Failure) -> None:
        """Let the monitor close a communicator's connections once all ranks have let go of it.

        The garbage collector may call this, inside any other call.
        """
        self._released.append((engine, failure))

    def shutdown(self) -> None:
        """Let the thread run the jobs submitted so far, close all connections, and end."""
        self.queue.end(self._disconnect_all)

    def close(self, seconds: float | None) -> None:
        """Shut down and wait for it; after ``seconds``, abort what is under way."""
        self.shutdown()
        if not self.queue.join(seconds):
            self.abort(Cause(f"rank {self.me} ended while jobs were under way"))
            self.queue.join(seconds)

    def check(self) -> None:
        """Abort when the job under way waits for a message that will never come.

        The job may wait for a rank that has not heard of a failure itself, or that is in another
        call. Connections that no rank uses any more are closed on this occasion.
        """
        self._drop_released()
        since = self.queue.since
        if since is None or time.monotonic() - since < _MONITOR_SECONDS:
            return
        cause = self.failure.read() or self._disagreement()
        if cause is None:
            try:
                for engine in list(self.engines):
                    if engine.waiting:  # a rank that is ahead may have closed the other engines
                        engine.probe()
            except LostPeerError as error:
                cause = Cause(str(error))
        if cause is not None:
            self.abort(cause, _CAUSE_SECONDS)
            _alive.discard(self)

    def _perform(self, job: Callable[[], T]) -> T:
        if self.failure.cause is not None:
            raise _dead(self.failure.cause)
        try:
            result = job()
        except LostPeerError as error:
            self.job_failed = True
            patience = 0.0 if error.late else _CAUSE_SECONDS
            cause = self.abort(Cause(str(error)), patience)
            raise self._explained(cause).error() from error
        except BaseException as error:
            self.job_failed = True
            aborted = self.failure.cause is not None and isinstance(error, Exception)
            cause = self.abort(self._failed(error))
            if aborted:
                raise self._explained(cause).error() from error
            if cause.disagreed:
                raise self._explained(Cause(str(error), True)).error() from error
            raise
        failed = self.failure.cause
        if failed is not None and any(engine.hides_aborts for engine in self.engines):
            self.job_failed = True  # the job may have got anything
            raise self._explained(failed).error()
        return result

    def _failed(self, error: BaseException) -> Cause:
        """Return what the other ranks are told when this one raises ``error``."""
        what = ": ".join(filter(None, (type(error).__name__, str(error))))
        return Cause(f"rank {self.me} failed: {what}", isinstance(error, MismatchError))

    def _disagreement(self) -> Cause | None:
        """Compare this rank's calls with the others'; return a cause if they differ.

        Ranks that wait for one another in different calls get no message that tells them so.
        """
        latest = self.calls.latest
        if latest is None:
            return None
        other = self.failure.compare(latest.position, self.me, latest.history)
        if other is None:
            return None
        return Cause(f"ranks {other} and {self.me} wait in different calls; {SAME_CALLS}", True)

    def _explained(self, cause: Cause) -> Cause:
        """Return a cause that also says what the ranks called, where that differs."""
        if not cause.disagreed or self.calls.latest is None:
            return cause
        calls = self.failure.gather_calls(self.me, self.calls.latest.texts, _CALL_SECONDS)
        return Cause("; ".join(filter(None, (cause.text, differences(calls)))), disagreed=True)

    def _drop_released(self) -> None:
        for engine, failure in [self._released.popleft() for _ in range(len(self._released))]:
            if engine not in self.engines:
                continue  # it was closed
            if self.failure.cause is not None or (not engine.waiting and failure.finish(0.0)):
                self._drop(engine)
            else:
                self._released.append((engine, failure))

    def _is_idle(self) -> bool:
        """Tell whether no transfer is under way, or all were aborted."""
        return self.failure.cause is not None or not any(one.waiting for one in self.engines)

    def _drop(self, engine: Engine) -> None:
        engine.abort()
        with suppress(ValueError):  # another thread closed it meanwhile
            self.engines.remove(engine)

    def _disconnect_all(self) -> None:
        self.disconnect(self.engines[0], self.failure)
        for engine in list(self.engines):
            self._drop(engine)
        _alive.discard(self)


def _dead(cause: Cause) -> CommunicationError:
    """Return the error of jobs that come after the failure."""
    return CommunicationError(
        f"the communicator is dead: {cause.text}; to connect anew, close it on all ranks with "
        "sparcel.comm.resolve(group).close()"
    )


at_exit: list[Callable[[], object]] = []
"""Functions to call when the interpreter exits, after all executors have closed."""

_alive: set[Executor] = set()
_monitoring = threading.Lock()


@cache
def _start_monitor() -> None:
    threading.Thread(target=_monitor, name="sparcel-monitor", daemon=True).start()


def _monitor() -> None:
    while True:
        time.sleep(_MONITOR_SECONDS)
        _check_all()


def _check_all() -> None:
    """Check the executors; a function, so that no variable keeps the last one while others wait."""
    with _monitoring:
        for executor in list(_alive):
            executor.check()


@atexit.register
def _close_all() -> None:
    """Close all executors: a thread that is inside an engine would crash the exiting process."""
    # The last error that the interpreter has printed; at a prompt people go on after it.
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for executor in list(_alive):
        executor.uncaught = uncaught
        executor.close(_EXIT_SECONDS)
    _monitoring.acquire(timeout=_EXIT_SECONDS)
    for call in at_exit:
        call()
