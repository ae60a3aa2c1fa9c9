"""Files at a place that islands reach: requests made again, and a store of torch.distributed."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from typing import TypeVar
from urllib.parse import quote
from uuid import uuid4

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from sparcel.core.comm import digest
from sparcel.errors import InputError, shown
from sparcel.products.meeting import Meeting
from sparcel.products.stores import ExclusiveStore, Folder, store_at
from sparcel.products.stores import Store as Place

T = TypeVar("T")

_ROOT = "meet-"
"""What all names of files begin with."""

_NAME_CHARACTERS, _KEPT_CHARACTERS = 180, 140
"""How long a key's name may be, and how much remains of a longer one; names end at 255."""

_FOLDER_SECONDS, _MEETING_SECONDS, _REMOTE_SECONDS, _MOST_SECONDS = 0.005, 0.02, 0.1, 1.0
"""How long to wait between two looks: at first, by what is looked at, and at most."""

_WAITED_SHARE = 0.1
"""How long to wait until the next look, as a share of what was waited before."""

_COUNTED = re.compile(rb"(-?\d{1,19}) [0-9a-f]{32}")
"""What a file of a counter holds: the sum, and what tells its writer."""

_FIRST_PAUSE, _MOST_PAUSE = 0.05, 0.5
"""How long to wait before a request that has failed is made again: at first, and at most."""

FINAL_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)
"""Errors that do not pass."""


class Retrying:
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
            except FINAL_ERRORS:
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


def looks(least: float, seconds: float, wake: threading.Event | None = None) -> Iterator[None]:
    """Yield at once, and then ever less often until ``seconds`` are over."""
    begin, wake = time.monotonic(), wake or threading.Event()
    while True:
        yield
        waited = time.monotonic() - begin
        if waited >= seconds:
            return
        wake.wait(min(max(least, _WAITED_SHARE * waited), _MOST_SECONDS, seconds - waited))


def created(place: Retrying, name: str, parts: Sequence[bytes | memoryview]) -> bool:
    """Create a file that nobody else writes alike; return whether it was not there.

    A request may have been repeated because its answer got lost, so what is there may be this one.
    """
    return place.create(name, parts) or bytes(place.read(name)) == b"".join(parts)


def _escaped(key: str) -> str:
    return _ROOT + quote(key, safe="").replace("%", "=")


def named(key: str) -> str:
    """Return the name of a key's file; names of what belongs to it go on with ``!``."""
    name = _escaped(key)
    if len(name) <= _NAME_CHARACTERS:
        return name
    return f"{name[:_KEPT_CHARACTERS]}=={digest(key, 128):032x}"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class BucketStore(Store):
    """A store of torch.distributed over files, for threads of Python alone.

    `under` gives one with a prefix; torch's `PrefixStore` would call this one from C++, in which a
    thread must not be when Python ends. A key of `add` can be read by ``add(key, 0)`` alone.

    Parameters
    ----------
    place
        A folder's path, a URL that fsspec knows, or a store of `sparcel.delta`; nobody else
        publishes there.
    seconds
        For how long a request that fails is made again.

    Attributes
    ----------
    found
        The store that holds the files.
    place
        The same, whose requests are made again.
    messages
        The same, for files that need not outlive a crash of the machine.
    pause
        Seconds between two looks at first.
    prefix
        What all keys begin with in the files.

    Raises
    ------
    InputError
        When the place cannot tell which of several writers of a file is the first.
    """

    timeout: timedelta  # torch's stub lacks it
    prefix = ""

    def __init__(self, place: Place | str | os.PathLike[str], seconds: float = 0.0) -> None:
        super().__init__()
        found = store_at(place)
        probe = _ROOT + uuid4().hex
        if not isinstance(found, ExclusiveStore):
            raise InputError(f"{type(found).__name__} cannot be a bucket: it has no create()")
        self.found, self.place = found, Retrying(found, seconds)
        self.messages = Retrying(passing(found), seconds)
        try:
            self.place.create(probe, [b"1"])
            if self.place.create(probe, [b"2"]):
                raise InputError(
                    f"{found} cannot be a bucket: it lets several writers create the same file"
                )
        finally:
            self.place.remove(probe)
        self.pause = _REMOTE_SECONDS
        if isinstance(found, Folder):
            self.pause = _FOLDER_SECONDS
        elif isinstance(found, Meeting):
            self.pause = _MEETING_SECONDS

    def under(self, prefix: str) -> BucketStore:
        """Return the store whose keys are this one's with ``"{prefix}/"`` before them."""
        below = BucketStore.__new__(BucketStore)  # a store of torch's cannot be copied
        super(BucketStore, below).__init__()
        vars(below).update(vars(self), prefix=f"{self.prefix}{prefix}/")
        return below

    def _name(self, key: str) -> str:
        return named(self.prefix + key)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key's value."""
        with self._telling():
            self.place.write(self._name(key), [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Return a key's value, for which this waits until the store's timeout."""
        for _ in looks(self.pause, self.timeout.total_seconds()):
            with self._telling(), suppress(FileNotFoundError):
                return bytes(self.place.read(self._name(key)))
        raise self._late([key], self.timeout)

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""
        with self._telling():
            return {self._name(key) for key in keys} <= set(self.place.names())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there, for the store's timeout unless another one is given."""
        most = self.timeout if timeout is None else timeout
        for _ in looks(self.pause, most.total_seconds()):
            if self.check(keys):
                return
        raise self._late(keys, most)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key that has the expected value, and return the value that it has then.

        If nothing is expected, the first of several writers wins. With another expectation nothing
        keeps writers apart.
        """
        name, before, after = self._name(key), _bytes(expected), _bytes(desired)
        with self._telling():
            if not before and self.place.create(name, [after]):
                return after
            try:
                current = bytes(self.place.read(name))
            except FileNotFoundError:
                return before
            if current != before or not before:
                return current
            self.place.write(name, [after])
            return after

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number and return the sum; each call that adds is a file of its own."""
        stem = self._name(key) + "!"
        with self._telling():
            while True:
                counted = [name.removeprefix(stem) for name in self._starting(stem)]
                last = max([int(number) for number in counted if number.isdecimal()], default=0)
                total = (self._counted(f"{stem}{last}") if last else 0) + amount
                line = f"{total} {uuid4().hex}".encode()  # tells its own from another's
                if not amount or created(self.place, f"{stem}{last + 1}", [line]):
                    return total

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        name = self._name(key)
        with self._telling():
            gone = [one for one in self._starting(name) if one == name or one[len(name)] == "!"]
            for one in gone:
                self.place.remove(one)
        return bool(gone)

    def clear(self) -> None:
        """Remove all keys, and all other files under the prefix, that nobody uses any more."""
        with self._telling():
            for name in self._starting(_escaped(self.prefix)):
                self.place.remove(name)

    def _counted(self, name: str) -> int:
        """Return the number in one of the files of `add`."""
        text = bytes(self.place.read(name))
        if not (found := _COUNTED.fullmatch(text)):
            raise DistStoreError(
                f"{name} in {self.place} is torn, or not written by sparcel: {shown(text[:40])};"
                " begin with another run or an empty place"
            )
        return int(found[1])

    def _starting(self, stem: str) -> list[str]:
        return [name for name in self.place.names() if name.startswith(stem)]

    def _late(self, keys: Iterable[str], most: timedelta) -> DistStoreError:
        told = ", ".join(self.prefix + key for key in keys)
        return DistStoreError(f"{told} did not come to {self.place} within {most}")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Turn errors into those of torch's stores."""
        try:
            yield
        except OSError as error:
            raise DistStoreError(f"{self.place} failed: {error!r}") from error
