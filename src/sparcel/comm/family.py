"""What a communicator shares with all that were split from it: one queue, and one end."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from sparcel.comm.base import Handle
from sparcel.comm.engine import Engine, LostPeerError
from sparcel.comm.fate import Fate
from sparcel.comm.jobs import JobQueue
from sparcel.errors import CommunicationError

T = TypeVar("T")

_PATIENCE_SECONDS = 0.5
"""How long a rank that saw a connection close waits for another to say why."""

_PARTING_SECONDS = 2.0
"""How long a rank that closes lets the others finish what is under way."""

_EXIT_SECONDS = 5.0
"""How long jobs may go on when the interpreter exits with an open communicator."""

_WATCH_SECONDS = 1.0
"""How often to look after a job that takes longer than that."""


class Family:
    """The jobs of communicators that are split from one another, which fail together.

    Parameters
    ----------
    me
        What the other ranks call this process.
    fate
        The end, shared with the other ranks.
    """

    def __init__(self, me: int, fate: Fate) -> None:
        self.me, self.fate = me, fate
        self.queue = JobQueue("sparcel")
        self.engines: list[Engine] = []
        _alive.add(self)
        _start_watch()

    def run(self, job: Callable[[], T]) -> T:
        """Run a job in its turn; when it raises, all ranks' families die."""
        return self.queue.run(lambda: self._perform(job))

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """Queue a job; when it raises, all ranks' families die."""
        return self.queue.submit(lambda: self._perform(job))

    def die(self, cause: str, patience: float = 0.0) -> str:
        """Tell all ranks the cause, unless they know of an earlier one; return the first."""
        first = self.fate.settle(cause, patience)
        for engine in list(self.engines):
            engine.abort()
        return first

    def leave(self, engine: Engine, fate: Fate) -> None:
        """Close the connections of one communicator, as a job.

        Ranks that are not done with it within a while fail: all of the family when it is the
        first communicator, and otherwise whoever still uses this one.
        """
        # The last messages may still be on their way, and a closed connection drops them.
        if self.fate.cause is None and not fate.part(_PARTING_SECONDS) and fate is self.fate:
            self.die(f"rank {self.me} closed its communicator before the others")
        engine.abort()
        self.engines.remove(engine)

    def retire(self) -> None:
        """Let the thread close all connections after the jobs submitted so far, and end."""
        self.queue.end(self._leave_all)

    def close(self, seconds: float | None) -> None:
        """Retire and wait for it; when it takes longer, break off what is under way."""
        self.retire()
        if not self.queue.join(seconds):
            self.die(f"rank {self.me} ended while jobs were under way")
            self.queue.join(seconds)

    def look_after(self) -> None:
        """Find out whether the job under way waits for something that will never come.

        It may wait for a rank that itself knows nothing of the failure, and Gloo does not wake
        whoever has received, or sent, half a message when a connection breaks.
        """
        since = self.queue.since
        if since is None or time.monotonic() - since < _WATCH_SECONDS:
            return
        cause = self.fate.learn()
        if cause is None:
            try:
                for engine in list(self.engines):
                    if engine.waiting:  # others may have been closed by ranks ahead of this one
                        engine.probe()
            except LostPeerError as error:
                cause = str(error)
        if cause is not None:
            self.die(cause, _PATIENCE_SECONDS)
            _alive.discard(self)

    def _perform(self, job: Callable[[], T]) -> T:
        if self.fate.cause is not None:
            raise _dead(self.fate.cause)
        try:
            return job()
        except LostPeerError as error:
            patience = 0.0 if error.late else _PATIENCE_SECONDS
            raise CommunicationError(self.die(str(error), patience)) from error
        except BaseException as error:
            what = ": ".join(filter(None, (type(error).__name__, str(error))))
            self.die(f"rank {self.me} failed: {what}")
            raise

    def _leave_all(self) -> None:
        self.leave(self.engines[0], self.fate)
        for engine in list(self.engines):
            engine.abort()
        _alive.discard(self)


def _dead(cause: str) -> CommunicationError:
    """Return what jobs raise that come after the failure."""
    return CommunicationError(
        f"the communicator is dead: {cause}; to connect anew, close it on all ranks with "
        "sparcel.comm.resolve(group).close()"
    )


at_last: list[Callable[[], object]] = []
"""What to do when the interpreter goes, after all families have closed."""

_alive: set[Family] = set()
_watching = threading.Lock()


@cache
def _start_watch() -> None:
    threading.Thread(target=_watch, name="sparcel-watch", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(_WATCH_SECONDS)
        with _watching:
            for family in list(_alive):
                family.look_after()


@atexit.register
def _close_all() -> None:
    """Leave no thread inside the engine when the interpreter goes, which would crash it."""
    for family in list(_alive):
        family.close(_EXIT_SECONDS)
    _watching.acquire(timeout=_EXIT_SECONDS)
    for do in at_last:
        do()
