"""Jobs, and the queue that runs them one at a time in the order of submission."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from queue import Empty, SimpleQueue
from traceback import clear_frames
from typing import Any, Generic, TypeVar

import torch

from sparcel.core.side_stream import SideJob, SideStream
from sparcel.errors import CommunicationError

T = TypeVar("T")

_SIGNAL_SECONDS = 0.2
"""How long a waiting thread may take to notice Ctrl-C."""

CLOSED = "the communicator was closed; sparcel.comm.resolve(group) gives another one"


class Job(Generic[T]):
    """A function that a communicator runs, or has run, in its turn.

    Parameters
    ----------
    job
        The function to run.

    Attributes
    ----------
    beside
        The job on the side stream of a GPU; None on the CPU.
    """

    def __init__(self, job: Callable[[], T]) -> None:
        self.beside: SideJob[T] | None = None
        self._job: Callable[[], T] | None = job
        # Not torch's future: what refers to itself through one, as an error does through its
        # traceback, is never collected. Python's own takes some twenty calls to wait for.
        self._ended = False
        self._result: T
        self._error: Exception | None = None
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._followers: deque[Callable[[], None]] = deque()

    @cached_property
    def future(self) -> torch.futures.Future[T]:
        """A future of torch's that receives the function's result, or what it raised."""
        beside = self.beside
        future: torch.futures.Future[T] = beside.future() if beside else torch.futures.Future()

        def pass_on() -> None:
            error = self._raised()
            if error is None:
                try:
                    (beside.fulfil if beside else type(future).set_result)(future, self._result)
                except Exception as of_the_gpu:  # the thread that runs jobs goes on
                    error = of_the_gpu.with_traceback(None)  # which refers to the future
            if error is not None:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong

        self._followers.append(pass_on)
        if self._ended:
            self._tell_followers()
        return future

    def wait(self) -> T:
        """Block until the job has ended; return its result, or raise what it raised.

        On a GPU the job's work may still be under way; what this thread queues next on its current
        stream runs after it. Ctrl-C interrupts the wait, but not the job.
        """
        # A wait without a limit would miss a signal that arrives just before it begins.
        while not self._ended:
            try:
                self._wakes.get(timeout=_SIGNAL_SECONDS)
            except Empty:
                continue
            self._wakes.put(None)  # others may wait, too
        error = self._raised()
        if self.beside is not None:
            self.beside.join(None if error else self._result)
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del self, error  # the traceback refers to this call

    def run(self) -> None:
        """Run the job on this thread and pass its result, or its error, to those who wait."""
        job, self._job = self._job, None
        assert job is not None
        try:
            result = job()
        except Exception as error:
            self.fail(error)
        except BaseException as error:  # such as SystemExit, which must not end the thread
            self.fail(CommunicationError(f"a job was ended by {error!r}"))
        else:
            self._result = result
            self._end()
        finally:
            del self, job  # the traceback refers to this call

    def fail(self, error: Exception) -> None:
        """Make the job raise ``error``, unless it has ended."""
        if not self._ended:
            _forget_variables(error)
            self._error = error
            self._end()

    def _raised(self) -> Exception | None:
        """Return what the job raised, an object of its own for each who asks; None if nothing.

        An error refers to all calls that it leaves, and so to what their variables hold: a model,
        and this job. If the job referred to it, neither would be freed before a garbage collection.
        """
        error = self._error
        if error is not None:
            self._error = _twin(error)
        return error

    def _end(self) -> None:
        self._ended = True
        self._wakes.put(None)
        if self._followers:
            self._tell_followers()

    def _tell_followers(self) -> None:
        """Call each follower once, whichever threads call this."""
        while self._followers:
            try:
                follower = self._followers.popleft()
            except IndexError:  # another thread was faster
                return
            follower()


def _twin(error: Exception) -> Exception:
    """Return another error of the same class, with all that it holds."""
    twin = type(error).__new__(type(error), *error.args)  # whatever its __init__ makes of arguments
    twin.__dict__.update(error.__dict__)
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(error.__traceback__)


def _forget_variables(error: BaseException) -> None:
    """Let go of the variables of all calls that an error, and what led to it, has left."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]


def submit_beside(
    side: SideStream, submit: Callable[[Callable[[], T]], Job[T]], job: Callable[[], T]
) -> Job[T]:
    """Queue a job of a GPU by ``submit``, with its work on a stream beside the caller's."""
    beside = SideJob(side, job)
    queued = submit(beside.perform)
    queued.beside = beside
    return queued


class JobQueue:
    """Runs jobs one at a time, on a daemon thread or on the caller's thread, until it ends.

    Queued jobs come before later ones. Ctrl-C may arrive at any point. It cannot interrupt entering
    a ``with`` on a lock, or a plain assignment, halfway; so ``_turn`` never stays taken.

    Attributes
    ----------
    since
        When the job under way began, on the monotonic clock; None if there is none.
    ended
        Whether the queue refuses new jobs.
    """

    def __init__(self, name: str) -> None:
        self.since: float | None = None
        self.ended = False
        self._pending: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._turn, self._counting = threading.Lock(), threading.Lock()
        self._waiting = 0  # jobs that were submitted and have not yet run; void after the end
        self._runner: int | None = None
        self._over = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` after all jobs submitted before, and return its result.

        If no other job waits, the job runs on the caller's thread; this saves waking two threads.

        Raises
        ------
        CommunicationError
            When the queue has ended.
        """
        if self.is_current():
            return job()
        if not self._waiting and not self._turn.locked():  # acquiring a taken lock ignores Ctrl-C
            with self._turn:
                if not self._waiting and not self.ended:
                    return self._perform(job)
        return self.submit(job).wait()

    def submit(self, job: Callable[[], T]) -> Job[T]:
        """Queue ``job``; inside another job it runs at once, since that job may wait for it.

        Raises
        ------
        CommunicationError
            When the queue has ended.
        """
        if self.ended:
            raise CommunicationError(CLOSED)
        queued = Job(job)
        if self.is_current():
            queued.run()
        else:
            self._count(1)
            self._pending.put(queued)
            if self._over:  # the queue ended after the check above
                queued.fail(CommunicationError(CLOSED))
        return queued

    def is_current(self) -> bool:
        """Tell whether the caller is a job of this queue."""
        return self._runner == threading.get_ident()

    def end(self, last: Callable[[], object]) -> None:
        """Refuse new jobs; run those submitted so far, then ``last``, and end the thread.

        The garbage collector may call this, inside any other call.
        """
        if not self.ended:
            self.ended = True
            self._pending.put(Job(last))
            self._pending.put(None)

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread to end; return whether it has ended."""
        if not self.is_current():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _count(self, change: int) -> None:
        with self._counting:
            self._waiting += change

    def _perform(self, job: Callable[[], T]) -> T:
        """Run a job on this thread, which holds ``_turn``."""
        try:
            self.since, self._runner = time.monotonic(), threading.get_ident()
            return job()
        finally:
            self._runner = self.since = None

    def _work(self) -> None:
        while (queued := self._pending.get()) is not None:
            with self._turn:
                self._perform(queued.run)
                self._count(-1)
            del queued  # otherwise the job's tensors would live until the next job
        self._over = True  # jobs that were put since the end, or will be, must fail
        with suppress(Empty):
            while True:
                if (late := self._pending.get_nowait()) is not None:
                    late.fail(CommunicationError(CLOSED))
