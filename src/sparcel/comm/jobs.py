"""The queue: jobs one at a time, in the order of their submission."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from sparcel.comm.base import Handle
from sparcel.errors import CommunicationError

T = TypeVar("T")

_SIGNAL_SECONDS = 0.2
"""How long Ctrl-C may go unseen."""

_CLOSED = "the communicator was closed"


class QueuedHandle(Handle[T]):
    """A job in a queue, ``expected`` where it was counted as due."""

    def __init__(self, job: Callable[[], T], expected: bool) -> None:
        super().__init__()
        self.expected = expected
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


class JobQueue:
    """Runs jobs one at a time, on a daemon thread or the caller's, until it is ended."""

    def __init__(self, name: str) -> None:
        self._pending: _Pending = SimpleQueue()
        self._state = _State()
        self._thread = threading.Thread(
            target=_work, args=(self._pending, self._state), name=name, daemon=True
        )
        self._thread.start()
        self.ended = False

    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` after all jobs submitted before, and return its result.

        It runs on the caller's thread where no other job is due, which saves waking two threads.

        Raises
        ------
        CommunicationError
            When the queue was ended.
        """
        if self.is_current():
            return job()
        if self.ended:
            raise CommunicationError(_CLOSED)
        state = self._state
        if not state.due and not state.turn.locked():  # else wait where Ctrl-C is seen
            with state.turn:
                if not state.due and not self.ended:
                    return state.perform(job)
        return self.submit(job).wait()

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """Queue ``job``; a job that submits another runs it at once, for it may wait for it.

        Raises
        ------
        CommunicationError
            When the queue was ended.
        """
        if self.ended:
            raise CommunicationError(_CLOSED)
        handle = QueuedHandle(job, expected=True)
        if self.is_current():
            handle.run()
        else:
            self._state.count(1)
            self._pending.put(handle)
            if self._state.over:  # the queue was ended since it was asked
                handle.fail(CommunicationError(_CLOSED))
        return handle

    def is_current(self) -> bool:
        """Tell whether the caller is a job of this queue."""
        return self._state.runner == threading.get_ident()

    @property
    def since(self) -> float | None:
        """When the job under way began, on the monotonic clock; None where there is none."""
        return self._state.since

    def end(self, last: Callable[[], object]) -> None:
        """Take no more jobs; after those submitted so far run ``last``, and end the thread.

        May be called by the garbage collector, which may run inside any other call.
        """
        if not self.ended:
            self.ended = True
            self._pending.put(QueuedHandle(last, expected=False))
            self._pending.put(None)

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread to end, and tell whether it has."""
        if not self.is_current():
            self._thread.join(timeout)
        return not self._thread.is_alive()


_Pending: TypeAlias = "SimpleQueue[QueuedHandle[Any] | None]"


class _State:
    """Whose turn it is: one job at a time, the jobs in the queue before any that comes later.

    Ctrl-C may come at any point, and neither ``with`` on a lock nor plain assignments can be torn
    apart by it: the turn is never left taken.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._counting = threading.Lock()
        self.due = 0
        self.runner: int | None = None
        self.since: float | None = None
        self.over = False

    def count(self, change: int) -> None:
        """Count jobs in the queue, from when they are submitted until they have run."""
        with self._counting:
            self.due += change

    def perform(self, job: Callable[[], T]) -> T:
        """Run a job on this thread, whose turn it is."""
        try:
            self.since, self.runner = time.monotonic(), threading.get_ident()
            return job()
        finally:
            self.runner = self.since = None


def _work(pending: _Pending, state: _State) -> None:
    while (handle := pending.get()) is not None:
        with state.turn:
            state.perform(handle.run)
            state.count(-handle.expected)
        del handle  # or the job's tensors would live until the next
    state.over = True  # what is put from now on, or was since the end, nobody runs
    with suppress(Empty):
        while True:
            if (late := pending.get_nowait()) is not None:
                late.fail(CommunicationError(_CLOSED))
