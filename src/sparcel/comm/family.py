"""What a communicator shares with all that were split from it: one queue, and one end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sparcel.comm.base import Handle
from sparcel.comm.engine import Engine, LostPeerError
from sparcel.comm.fate import Fate
from sparcel.comm.jobs import JobQueue
from sparcel.errors import CommunicationError

T = TypeVar("T")

_PATIENCE_SECONDS = 0.5
"""How long a rank that saw a connection close waits for another to say why."""

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
        threading.Thread(target=self._watch, name="sparcel-watch", daemon=True).start()

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """Queue a job; when it raises, all ranks' families die."""
        return self.queue.submit(lambda: self._perform(job))

    def die(self, cause: str, patience: float = 0.0) -> str:
        """Tell all ranks the cause, unless they know of an earlier one; return the first."""
        first = self.fate.settle(cause, patience)
        self.disconnect()
        return first

    def disconnect(self) -> None:
        """Close all connections."""
        for engine in list(self.engines):
            engine.abort()

    def look_after(self) -> None:
        """Find out whether the job under way waits for something that will never come.

        Gloo wakes those who wait when a connection breaks, but for whoever has received, or sent,
        half a message: that one waits until the timeout, and cannot be woken. So the job is
        given up, with all after it, and its thread left to the timeout.
        """
        job, since = self.queue.under_way
        if job is None or time.monotonic() - since < _WATCH_SECONDS:
            return
        cause = self.fate.learn()
        if cause is None:
            try:
                for engine in list(self.engines):
                    engine.probe()
            except LostPeerError as error:
                cause = str(error)
        if cause is None:
            return
        cause = self.die(cause, _PATIENCE_SECONDS)
        time.sleep(_PATIENCE_SECONDS)  # most that wait have been woken now
        if self.queue.under_way[0] is job and any(engine.waiting for engine in self.engines):
            self.queue.abandon(CommunicationError(cause))

    def _perform(self, job: Callable[[], T]) -> T:
        if self.fate.cause is not None:
            raise CommunicationError(f"the communicator is dead: {self.fate.cause}")
        try:
            return job()
        except LostPeerError as error:
            patience = 0.0 if error.late else _PATIENCE_SECONDS
            raise CommunicationError(self.die(str(error), patience)) from error
        except BaseException as error:
            self.die(f"rank {self.me} failed: {type(error).__name__}: {error}")
            raise

    def _watch(self) -> None:
        while not self.queue.drained:
            self.look_after()
            time.sleep(_WATCH_SECONDS)
