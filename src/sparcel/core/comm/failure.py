"""The failure state that the ranks of a communicator share, and their agreement to finish.

It also holds what slow or failed ranks called, so that ranks that disagree can say how. All of it
travels through a store, because a broken connection cannot carry it and because not every pair of
ranks has a connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from torch.distributed.distributed_c10d import Store

from sparcel.errors import CommunicationError, MismatchError

T = TypeVar("T")

STORE_SECONDS = 2.0
"""How long a store in a process of the cluster may take to answer."""

_POLL_SECONDS = 0.005
"""How often to read such a store; its own wait prints a warning when it times out."""


class Cause(NamedTuple):
    """Why a communicator failed; ``disagreed`` if ranks called it with different arguments."""

    text: str
    disagreed: bool = False

    def error(self) -> CommunicationError | MismatchError:
        """Return the error that the cause is for every rank."""
        return (MismatchError if self.disagreed else CommunicationError)(self.text)


class Failure:
    """The failure of a communicator, if any, which its ranks share through a store.

    Parameters
    ----------
    store
        A store that no other communicator uses.
    size
        Number of ranks.
    seconds
        How long the store may take to answer; its host may be the process that failed.
    pause
        Seconds between two looks at the store.

    Attributes
    ----------
    cause
        The first cause that this rank knows of, or None.
    """

    KEY = "cause"
    """The key that a failed communicator has in its store."""

    def __init__(
        self, store: Store, size: int, seconds: float = STORE_SECONDS, pause: float = _POLL_SECONDS
    ) -> None:
        self._store, self._size, self._seconds, self._pause = store, size, seconds, pause
        self.cause: Cause | None = None
        self._position = ""  # the last one given to `compare`
        self._announced = False

    def publish(self, cause: Cause, patience: float = 0.0) -> Cause:
        """Publish why the communicator failed, unless a rank did so before; return the first cause.

        A rank that saw a connection close, and knows no more, gives a ``patience``: it waits so
        many seconds for another rank's cause.
        """
        if self.cause is None:
            first = answer_within(lambda: self._publish(cause, patience), patience + self._seconds)
            self.cause = first or cause
        return self.cause

    def read(self) -> Cause | None:
        """Return the cause that a rank has published, or None."""
        return self.cause or answer_within(self._read, self._seconds)

    def compare(self, position: str, rank: int, history: str) -> int | None:
        """Return a rank that made other calls at this position in the program, or None.

        A history is one line for each call. Ranks may be at different lines of the same history.
        """
        return answer_within(lambda: self._compare(position, rank, history), self._seconds)

    def gather_calls(self, rank: int, texts: str, patience: float) -> dict[int, str]:
        """Give the others this rank's call; return the calls that came within ``patience`` s."""
        calls = answer_within(lambda: self._gather(rank, texts, patience), patience + self._seconds)
        return calls or {rank: texts}

    def finish(self, patience: float) -> bool:
        """Announce that this rank is done; return whether all ranks are within ``patience`` s.

        May be called again to ask again.
        """
        return bool(answer_within(lambda: self._finish(patience), patience + self._seconds))

    def _publish(self, cause: Cause, patience: float) -> Cause:
        wait_until(lambda: self._store.check([self.KEY]), patience, self._pause)
        first: bytes = self._store.compare_set(self.KEY, "", f"{cause.disagreed:d}{cause.text}")
        return _decoded(first)

    def _read(self) -> Cause | None:
        return _decoded(self._store.get(self.KEY)) if self._store.check([self.KEY]) else None

    def _compare(self, position: str, rank: int, history: str) -> int | None:
        """Keep the longest history of a position in the store."""
        if self._position not in ("", position):  # this rank has passed that one
            self._store.delete_key(f"call {self._position}")
        self._position, key, own = position, f"call {position}", f"{rank} {history}"
        longest = self._store.compare_set(key, "", own).decode()
        other, _, theirs = longest.partition(" ")
        if history.startswith(theirs):
            if history != theirs:
                self._store.compare_set(key, longest, own)
            return None
        return None if theirs.startswith(history) else int(other)

    def _gather(self, rank: int, texts: str, patience: float) -> dict[int, str]:
        self._store.set(f"called {self._store.add('calls', 1)}", f"{rank} {texts}")
        keys = [f"called {number}" for number in range(1, self._size + 1)]
        wait_until(lambda: self._store.check(keys), patience, self._pause)
        came = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        pairs = (text.split(" ", 1) for text in came)
        return {int(rank): texts for rank, texts in pairs}

    def _finish(self, patience: float) -> bool:
        if not self._announced:
            self._announced = True
            self._store.add("done", 1)
        return wait_until(self._all_done, patience, self._pause)

    def _all_done(self) -> bool:
        return bool(self._store.add("done", 0) == self._size)


def _decoded(cause: bytes) -> Cause:
    text = cause.decode()
    return Cause(text[1:], text[0] == "1")


def wait_until(holds: Callable[[], bool], seconds: float, pause: float = _POLL_SECONDS) -> bool:
    """Ask until ``holds`` returns True, for at most ``seconds``; return the last answer."""
    deadline = time.monotonic() + seconds
    while not (answer := holds()) and time.monotonic() < deadline:
        time.sleep(pause)
    return answer


def answer_within(ask: Callable[[], T], seconds: float) -> T | None:
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
