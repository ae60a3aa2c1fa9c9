"""What ranks tell each other beside their messages: why they failed, and that they are done.

It goes a way of its own, since a connection that broke carries no reasons, and since not every two
ranks have one: over torch.distributed, through the store that process groups meet at.
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
"""How long the store may take to answer; its host may be what failed."""

_POLL_SECONDS = 0.005
"""How often to look; the store's own wait prints a warning where nothing comes."""


class Fate(Protocol):
    """The end of a group, which its ranks share."""

    cause: str | None

    def settle(self, cause: str, patience: float = 0.0) -> str:
        """Publish why the group failed, unless a rank did so before; return the first cause.

        ``patience`` is how many seconds to wait for another rank's cause first, for one that has
        seen a connection close and knows no more.
        """

    def learn(self) -> str | None:
        """Return the cause that a rank has published, or None."""

    def part(self, patience: float) -> bool:
        """Tell the others that this rank is done, and whether all said so within ``patience``."""


class StoreFate:
    """The end of a group whose ranks have a store.

    Parameters
    ----------
    store
        A store of the group's own.
    size
        Number of ranks.
    """

    def __init__(self, store: Store, size: int) -> None:
        self._store, self._size = store, size
        self.cause: str | None = None

    def settle(self, cause: str, patience: float = 0.0) -> str:
        """See `Fate.settle`."""
        if self.cause is None:
            first = bounded(lambda: self._publish(cause, patience), patience + _STORE_SECONDS)
            self.cause = first or cause
        return self.cause

    def learn(self) -> str | None:
        """See `Fate.learn`."""
        return self.cause or bounded(self._read, _STORE_SECONDS)

    def part(self, patience: float) -> bool:
        """See `Fate.part`."""
        return bool(bounded(lambda: self._part(patience), patience + _STORE_SECONDS))

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

    def _part(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        done: int = self._store.add("done", 1)
        while done < self._size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            done = self._store.add("done", 0)
        return done == self._size


def bounded(ask: Callable[[], T], seconds: float) -> T | None:
    """Return what ``ask`` of a store returns, or None when it fails or takes too long."""
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):  # the store's host is gone
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # since Python 3.12, when the interpreter exits
        run()
    else:
        thread.join(seconds)
    return answers[0] if answers else None
