"""The queue: one thread that runs jobs in the order of their submission."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from sparcel.comm.base import Handle
from sparcel.errors import CommunicationError

T = TypeVar("T")

_SIGNAL_SECONDS = 0.2
"""How long Ctrl-C may go unseen."""

_CLOSED = "the communicator was closed"


class QueuedHandle(Handle[T]):
    """A job in a queue."""

    def __init__(self, job: Callable[[], T]) -> None:
        super().__init__()
        self._job: Callable[[], T] | None = job
        self._claim = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> None:
        """Run the job on this thread; what comes of it goes to whoever waits."""
        job, self._job = self._job, None
        assert job is not None
        try:
            result = job()
        except Exception as error:
            self.fail(error)
        except BaseException as error:  # such as SystemExit, which must not end the thread
            self.fail(CommunicationError(f"a job was ended by {error!r}"))
        else:
            if self._claim.acquire(blocking=False):
                self.future.set_result(result)
                self._ended.set()

    def fail(self, error: Exception) -> None:
        """Let ``error`` be what comes of the job, unless it has ended."""
        if self._claim.acquire(blocking=False):
            self.future.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong
            self._ended.set()

    def wait(self) -> T:
        """See `Handle.wait`; Ctrl-C ends the wait, and the job goes on."""
        # torch's own wait cannot be interrupted, and a signal just before a wait without a limit
        # would go unseen until its end.
        while not self._ended.wait(_SIGNAL_SECONDS):
            pass
        return self.future.wait()


_Pending: TypeAlias = "SimpleQueue[QueuedHandle[Any] | None]"


@dataclass
class _UnderWay:
    """The job that runs, since when (on the monotonic clock), and whether none will any more."""

    job: QueuedHandle[Any] | None = None
    since: float = 0.0
    over: bool = False


class JobQueue:
    """Runs jobs one at a time on a daemon thread, until it is ended."""

    def __init__(self, name: str) -> None:
        self._pending: _Pending = SimpleQueue()
        self._under_way = _UnderWay()
        self._thread = threading.Thread(
            target=_work, args=(self._pending, self._under_way), name=name, daemon=True
        )
        self._thread.start()
        self.ended = False
        self._abandoned: Exception | None = None

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """Queue ``job``; a job that submits another runs it at once, for it may wait for it.

        Raises
        ------
        CommunicationError
            When the queue was ended.
        """
        if self.ended:
            raise CommunicationError(_CLOSED)
        handle = QueuedHandle(job)
        if self.is_current():
            handle.run()
        else:
            self._pending.put(handle)
            if self._abandoned is not None:
                handle.fail(self._abandoned)
            elif self._under_way.over:  # the queue was ended since it was asked
                handle.fail(CommunicationError(_CLOSED))
        return handle

    def is_current(self) -> bool:
        """Tell whether the caller is a job of this queue."""
        return threading.current_thread() is self._thread

    @property
    def under_way(self) -> tuple[QueuedHandle[Any] | None, float]:
        """The job that runs, and since when (on the monotonic clock)."""
        return self._under_way.job, self._under_way.since

    def abandon(self, error: Exception, after: Exception) -> None:
        """Let the job under way fail with ``error``, and all others, now and later, ``after``."""
        self._abandoned = after
        if self._under_way.job is not None:
            self._under_way.job.fail(error)
        _fail_all(self._pending, after)
        self._pending.put(None)

    def end(self, last: Callable[[], object]) -> None:
        """Take no more jobs; after those submitted so far run ``last``, and end the thread.

        May be called by the garbage collector, which may run inside any other call.
        """
        if not self.ended:
            self.ended = True
            self._pending.put(QueuedHandle(last))
            self._pending.put(None)

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread to end, unless its job was abandoned; tell whether it is over."""
        if self._abandoned is None and not self.is_current():
            self._thread.join(timeout)
        return self._abandoned is not None or not self._thread.is_alive()


def _work(pending: _Pending, under_way: _UnderWay) -> None:
    while (handle := pending.get()) is not None:
        under_way.since, under_way.job = time.monotonic(), handle
        handle.run()
        under_way.job = None
        del handle  # or the job's tensors would live until the next
    under_way.over = True  # what is put from now on, or was since the end, nobody runs
    _fail_all(pending, CommunicationError(_CLOSED))


def _fail_all(pending: _Pending, error: Exception) -> None:
    with suppress(Empty):
        while True:
            if (handle := pending.get_nowait()) is not None:
                handle.fail(error)
