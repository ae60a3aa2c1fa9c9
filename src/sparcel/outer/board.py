"""What islands do at the place where they meet: its files, tried again when a request fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from typing import TypeVar

from sparcel.errors import CommunicationError
from sparcel.stores import ExclusiveStore, Folder

T = TypeVar("T")

_ROOT = "run-"
"""What the names of an island's files begin with."""

_FIRST_PAUSE, _MOST_PAUSE = 0.05, 0.5
"""How long to wait before a request that has failed is made again: at first, and at most."""

_LAST = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that do not pass."""


class Patient:
    """A store whose requests are made again when they fail.

    Parameters
    ----------
    store
        The store.
    seconds
        For how long; then the last error is raised.
    """

    def __init__(self, store: ExclusiveStore, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def read(self, name: str) -> memoryview:
        """See `Store.read`."""
        return self._ask(lambda: self._store.read(name))

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """See `Store.write`."""
        whole = [*parts]
        return self._ask(lambda: self._store.write(name, whole))

    def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
        """See `ExclusiveStore.create`; False, too, if an answer was lost to this writer."""
        whole = [*parts]
        return self._ask(lambda: self._store.create(name, whole))

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        self._ask(lambda: self._store.remove(name))

    def names(self) -> list[str]:
        """See `Store.names`."""
        return self._ask(self._store.names)

    def _ask(self, request: Callable[[], T]) -> T:
        begin, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return request()
            except _LAST:
                raise
            except OSError:
                if time.monotonic() - begin > self._seconds:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE)

    def __str__(self) -> str:
        return str(self._store)


def passing(store: ExclusiveStore) -> ExclusiveStore:
    """Return a store for files there that need not outlive a crash of the machine."""
    if isinstance(store, Folder):
        store = copy(store)
        store.lasting = False
    return store


class Board:
    """Keys with texts, in a store.

    Raises
    ------
    CommunicationError
        When the store fails for so many seconds.
    """

    def __init__(self, store: ExclusiveStore, seconds: float) -> None:
        self._store, self._seconds = Patient(store, seconds), seconds
        self._now = passing(store)

    def create(self, key: str, text: str) -> str:
        """Create a key unless it is there; return the text that it has."""
        while not self._asked(lambda: self._store.create(_ROOT + key, [text.encode()])):
            if (found := self.read(key)) is not None:  # otherwise it has just been removed
                return found
        return text

    def read(self, key: str) -> str | None:
        """Return a key's text, or None."""
        with suppress(FileNotFoundError):
            return bytes(self._asked(lambda: self._store.read(_ROOT + key))).decode()
        return None

    def remove(self, keys: Iterable[str]) -> None:
        """Remove keys that are there, if the place can be reached now; nobody needs them."""
        with suppress(OSError):
            for key in keys:
                self._now.remove(_ROOT + key)

    def tell(self, key: str, text: str) -> None:
        """Write a key that decides nothing, if the place can be reached now."""
        with suppress(OSError):
            self._now.write(_ROOT + key, [text.encode()])

    def found(self, prefix: str) -> bool:
        """Tell whether there is a key that begins so, as far as it is known yet."""
        return any(one.startswith(_ROOT + prefix) for one in self._asked(self._store.names))

    def end(self, key: str) -> None:
        """Remove all but a key, and whatever else is in the store."""
        self.create(key, "")
        with suppress(OSError):
            for name in self._now.names():
                if name != _ROOT + key:
                    self._now.remove(name)

    def _asked(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except FileNotFoundError:
            raise
        except _LAST as error:
            raise CommunicationError(
                f"the place where islands meet refuses a request: {error!r}"
            ) from error
        except OSError as error:
            raise CommunicationError(
                f"the place where islands meet has not answered for {self._seconds:g} s: {error!r}"
            ) from error
