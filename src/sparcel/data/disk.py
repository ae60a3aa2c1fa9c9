"""Records on a local disk, which survive runs."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any
from weakref import WeakSet

from sparcel.data.database import Database, UnusableError, checksum, is_broken, is_whole
from sparcel.errors import SparcelError

_LARGEST = 900 << 20
"""Bytes of a record; SQLite's own limit is 10⁹."""

_lock = Lock()
"""Held while a thread uses a connection or forks: a child must not find it in another's hands."""


class Disk:
    """A key-value store in a folder, by sample index; call `open` first, or unpickle an open one.

    Any number of processes and runs may use it at once. Transactions are SQLite's, with a
    write-ahead log: a process that is killed leaves the last complete one. SQLite's connections
    must not pass a fork, so a process closes its own before it forks, and opens another when it
    needs one.

    Attributes
    ----------
    read_only
        Whether nothing should be put.
    """

    def __init__(self, database: Database) -> None:
        self._database, self.read_only = database, database.read_only
        self._connection: sqlite3.Connection | None = None
        _all.add(self)

    def __reduce__(self) -> Any:
        return Disk, (self._database,)

    def __del__(self) -> None:
        # In Python 3.11 a connection is part of a cycle and lives until the collector comes.
        # Without the lock, which goes now, others may replace the database: so it is closed here.
        self._disconnect()

    def open(self, is_alike: Callable[[int, bytes], bool], looks: int) -> None:
        """Make the database if there is none, or none of these samples, and connect to it.

        Parameters
        ----------
        is_alike
            ``(place, record) -> bool``: whether the source still has this sample. What it raises is
            an error of the source, which passes through.
        looks
            Of how many records, chosen at random, that is asked.

        Raises
        ------
        UnusableError
            When the folder cannot be used now, or others use it for something else.
        """
        database = self._database
        try:
            with self._errors():
                fault, looked = database.examine(looks)
            changed = [place for place, record in looked if not is_alike(place, record)]
            with self._errors():
                if changed:
                    database.condemn(f"sample {changed[0]} of the source changed")
                    fault = f"sample {changed[0]} of the source is not the one of {database.path}"
                database.settle(fault)
                self.read_only = database.read_only
                with _lock:
                    self._connected()
        except BaseException:
            database.leave()  # a traceback may keep this object, and others wait for the lock
            raise

    @property
    def used(self) -> int:
        """The bytes of the database and its log."""
        found, path = 0, self._database.path
        for file in (path, path.with_name(path.name + "-wal")):
            with suppress(OSError):  # other processes remove the log, and people the folder
                found += file.stat().st_size
        return found

    def get(self, places: Iterable[int]) -> tuple[dict[int, bytes], list[int]]:
        """Return the records that are there, by place, and the places of broken ones.

        Raises
        ------
        UnusableError
            When the database is broken. It is made anew when a process is next alone with it.
        """
        found, broken = {}, []
        query = "SELECT crc, record FROM samples WHERE place = ?"
        with _lock, self._errors():
            for place in places:
                for crc, record in self._connected().execute(query, (place,)).fetchall():
                    if is_whole(place, crc, record):
                        found[place] = record
                    else:
                        broken.append(place)
        return found, broken

    def put(self, records: dict[int, bytes]) -> None:
        """Keep records, all or none; those of more than 900 MiB are never kept.

        Raises
        ------
        UnusableError
            When they cannot be written: the disk is full, say. What is there can still be read.
        """
        rows = [
            (place, checksum(place, record), record)
            for place, record in records.items()
            if len(record) <= _LARGEST
        ]
        with _lock, self._errors():
            try:
                database = self._connected()
                database.execute("BEGIN IMMEDIATE")
                database.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", rows)
                database.execute("COMMIT")
            except BaseException:
                self._disconnect()  # which takes back what was begun
                raise

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._database.connect()
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):  # a full disk, which has been told
                connection.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of the disk into an `UnusableError`; condemn a database that is broken."""
        path = self._database.path
        try:
            yield
        except (OSError, SparcelError, sqlite3.Error) as error:
            why = str(error) if isinstance(error, SparcelError) else f"{path}: {error}"
            if is_broken(error):
                why = f"{path} is broken ({error}); it is made anew in the next run"
                with suppress(OSError):  # a full disk
                    self._database.condemn(f"{path} was broken ({error})")
            raise UnusableError(why) from error


_all: WeakSet[Disk] = WeakSet()


def _before_fork() -> None:
    _lock.acquire()
    for disk in _all:
        disk._disconnect()


os.register_at_fork(
    before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release
)
