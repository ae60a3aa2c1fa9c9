"""The failure state that the ranks of a communicator share, and their agreement to finish.

Failure causes travel through a store, because a broken connection cannot carry them and because not
every pair of ranks has a connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

_STORE_SECONDS = 2.0
"""How long the store may take to answer; its host may be the process that failed."""

_POLL_SECONDS = 0.005
"""How often to read the store; the store's own wait prints a warning when it times out."""


class Failure(Protocol):
    """The failure of a communicator, if any, which its ranks share.

    Attributes
    ----------
    cause
        The first cause that this rank knows of, or None.
    """

    cause: str | None

    def publish(self, cause: str, patience: float = 0.0) -> str:
        """Publish why the communicator failed, unless a rank did so before; return the first cause.

        A rank that saw a connection close, and knows no more, gives a ``patience``: it waits so
        many seconds for another rank's cause.
        """

    def read(self) -> str | None:
        """Return the cause that a rank has published, or None."""

    def finish(self, patience: float) -> bool:
        """Announce that this rank is done; return whether all ranks are within ``patience`` s."""


class StoreFailure:
    """The failure state of ranks that have a store.

    Parameters
    ----------
    store
        A store that no other communicator uses.
    size
        Number of ranks.
    """

    def __init__(self, store: Store, size: int) -> None:
        self._store, self._size = store, size
        self.cause: str | None = None

    def publish(self, cause: str, patience: float = 0.0) -> str:
        """See `Failure.publish`."""
        if self.cause is None:
            first = bounded(lambda: self._publish(cause, patience), patience + _STORE_SECONDS)
            self.cause = first or cause
        return self.cause

    def read(self) -> str | None:
        """See `Failure.read`."""
        return self.cause or bounded(self._read, _STORE_SECONDS)

    def finish(self, patience: float) -> bool:
        """See `Failure.finish`."""
        return bool(bounded(lambda: self._finish(patience), patience + _STORE_SECONDS))

    def _publish(self, cause: str, patience: float) -> str:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not self._store.check(["cause"]):
            time.sleep(_POLL_SECONDS)
        first: bytes = self._store.compare_set("cause", "", cause)
        return first.decode()

    def _read(self) -> str | None:
        if not self._store.check(["cause"]):
            return None
        cause: bytes = self._store.get("cause")
        return cause.decode()

    def _finish(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        done: int = self._store.add("done", 1)
        while done < self._size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            done = self._store.add("done", 0)
        return done == self._size


def bounded(ask: Callable[[], T], seconds: float) -> T | None:
    """Return the result of ``ask``, a request to a store; None when it fails or takes too long."""
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):  # the store's host is gone
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 and newer start no thread while the interpreter exits
        run()
    else:
        thread.join(seconds)
    return answers[0] if answers else None
