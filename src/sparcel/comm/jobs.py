"""The queue: one thread that runs jobs in the order of their submission."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from sparcel.comm.base import Handle
from sparcel.errors import CommunicationError

T = TypeVar("T")

_SIGNAL_SECONDS = 0.2
"""How long Ctrl-C may go unseen."""


class QueuedHandle(Handle[T]):
    """A job in a queue."""

    def __init__(self, job: Callable[[], T]) -> None:
        super().__init__()
        self._job: Callable[[], T] | None = job
        self._ended = threading.Event()

    def run(self) -> None:
        """Run the job on this thread; what comes of it goes to whoever waits."""
        job, self._job = self._job, None
        assert job is not None
        try:
            self.future.set_result(job())
        except Exception as error:
            self._set_error(error)
        except BaseException as error:  # such as SystemExit, which must not end the thread
            self._set_error(CommunicationError(f"a job was ended by {error!r}"))
        finally:
            self._ended.set()

    def _set_error(self, error: Exception) -> None:
        self.future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a result

    def wait(self) -> T:
        """See `Handle.wait`; Ctrl-C ends the wait, and the job goes on."""
        # torch's own wait cannot be interrupted, and a signal just before a wait without a limit
        # would go unseen until its end.
        while not self._ended.wait(_SIGNAL_SECONDS):
            pass
        return self.future.wait()


class JobQueue:
    """Runs jobs one at a time on a daemon thread, which ends with the queue."""

    def __init__(self, name: str) -> None:
        self._pending: SimpleQueue[QueuedHandle[object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._pending,), name=name, daemon=True)
        self._thread.start()
        self._drained = False
        weakref.finalize(self, self._pending.put, None)

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """Queue ``job``; a job that submits another runs it at once, for it may wait for it.

        Raises
        ------
        CommunicationError
            When the queue was drained.
        """
        if self._drained:
            raise CommunicationError("the communicator was closed")
        handle = QueuedHandle(job)
        if self.is_current():
            handle.run()
        else:
            self._pending.put(handle)  # type: ignore[arg-type]  # its type is its waiter's affair
        return handle

    def is_current(self) -> bool:
        """Tell whether the caller is a job of this queue."""
        return threading.current_thread() is self._thread

    def drain(self, timeout: float | None) -> bool:
        """End the thread after the jobs submitted so far; tell whether it ended in time."""
        self._drained = True
        self._pending.put(None)
        if not self.is_current():
            self._thread.join(timeout)
        return not self._thread.is_alive()


def _work(pending: SimpleQueue[QueuedHandle[object] | None]) -> None:
    while (handle := pending.get()) is not None:
        handle.run()
        del handle  # a job refers to its communicator, which must not live on for that
