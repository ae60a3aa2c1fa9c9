"""Records on a local disk, which survive runs."""

from __future__ import annotations

import os
import random
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

from sparcel.data.database import Database, UnusableError, is_broken

_LARGEST = 900 << 20
"""Bytes of a record; SQLite's own limit is 10⁹."""


class Disk:
    """A key-value store in a folder, by sample index.

    Any number of processes and runs may use it at once. Transactions are SQLite's, with a
    write-ahead log: a process that is killed leaves the last complete one. SQLite's connections
    must not pass a fork, so a process closes its own before it forks, and opens another when it
    needs one.

    Parameters
    ----------
    folder
        An existing folder.
    identity
        What the records are of. A database of anything else is replaced.
    is_alike
        ``(place, record) -> bool``: whether the source still has this sample. What it raises is an
        error of the source, which passes through.
    looks
        Of how many records, chosen at random, that is asked.
    say
        Is told why a database is replaced.

    Raises
    ------
    UnusableError
        When the folder cannot be used now, or others use it for something else.

    Attributes
    ----------
    read_only
        Whether nothing should be put.
    """

    _connection: sqlite3.Connection | None = None

    def __init__(
        self,
        folder: Path,
        identity: str,
        is_alike: Callable[[int, bytes], bool],
        looks: int,
        say: Callable[[str], None],
    ) -> None:
        with _errors_of(folder):
            self._database = Database(folder, identity)
        self._begin()
        try:
            self._prepare(is_alike, looks, say)
        except BaseException:
            self._database.leave()  # a traceback may keep this object, and others wait for the lock
            raise

    def _prepare(
        self, is_alike: Callable[[int, bytes], bool], looks: int, say: Callable[[str], None]
    ) -> None:
        looked: list[tuple[int, bytes]] = []
        with _errors_of(self.path.parent):
            found = self._database.examine(lambda database: looked.extend(_some(database, looks)))
        changed = [] if found else [place for place, one in looked if not is_alike(place, one)]
        with _errors_of(self.path.parent):
            if changed:
                self._database.condemn(f"sample {changed[0]} of the source changed")
                found = f"sample {changed[0]} of the source is not the one of {self.path}"
            self._database.settle(found, say)
            with self._lock:
                self._connected()

    def __del__(self) -> None:
        # In Python 3.11 a connection is part of a cycle and lives until the collector comes.
        # Without the lock, which goes now, others may replace the database: so it is closed here.
        self._disconnect()

    def _begin(self) -> None:
        self.read_only = self._database.read_only
        self._lock = Lock()
        _all.add(self)

    def __getstate__(self) -> Database:
        return self._database

    def __setstate__(self, database: Database) -> None:
        self._database = database
        self._begin()

    @property
    def path(self) -> Path:
        """Where the database is."""
        return self._database.path

    @property
    def used(self) -> int:
        """The bytes of the database and its log."""
        found = 0
        for file in (self.path, self.path.with_name(self.path.name + "-wal")):
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
        with self._lock:
            try:
                for place in places:
                    for crc, record in self._connected().execute(query, (place,)).fetchall():
                        if _is_whole(place, crc, record):
                            found[place] = record
                        else:
                            broken.append(place)
            except sqlite3.Error as error:
                raise self._failed(error) from error
        return found, broken

    def put(self, records: dict[int, bytes]) -> None:
        """Keep records, all or none; those of more than 900 MiB are never kept.

        Raises
        ------
        UnusableError
            When they cannot be written: the disk is full, say. What is there can still be read.
        """
        rows = [
            (place, _checksum(place, record), record)
            for place, record in records.items()
            if len(record) <= _LARGEST
        ]
        with self._lock:
            try:
                database = self._connected()
                database.execute("BEGIN IMMEDIATE")
                database.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", rows)
                database.execute("COMMIT")
            except BaseException as error:
                self._disconnect()  # which takes back what was begun
                if isinstance(error, sqlite3.Error):
                    raise self._failed(error) from error
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

    def _failed(self, error: sqlite3.Error) -> UnusableError:
        if is_broken(error):
            with suppress(OSError):  # a full disk
                self._database.condemn(f"{self.path} was broken ({error})")
            return UnusableError(
                f"{self.path} is broken ({error}); it is made anew in the next run"
            )
        return UnusableError(f"{self.path}: {error}")


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise UnusableError(f"{folder}: {error}") from error


def _some(database: sqlite3.Connection, count: int) -> Iterable[tuple[int, bytes]]:
    """Yield records at random; broken ones count as none."""
    (last,) = database.execute("SELECT max(place) FROM samples").fetchone()
    for _ in range(count if last is not None else 0):
        rows: list[Any] = database.execute(
            "SELECT place, crc, record FROM samples WHERE place >= ? LIMIT 1",
            (random.randint(0, last),),
        ).fetchall()
        yield from ((place, record) for place, crc, record in rows if _is_whole(place, crc, record))


def _is_whole(place: int, crc: int, record: object) -> bool:
    """Tell whether a record is as it was put; a torn file may make it text, or nothing."""
    return isinstance(record, bytes) and crc == _checksum(place, record)


def _checksum(place: int, record: bytes) -> int:
    return zlib.crc32(record, place & 0xFFFFFFFF)


_all: WeakSet[Disk] = WeakSet()
_fork = Lock()
"""Threads fork one by one: each must free the locks that it took, and no other's."""
_forking: list[Disk] = []


def _before_fork() -> None:
    _fork.acquire()
    _forking[:] = list(_all)
    for disk in _forking:
        disk._lock.acquire()
        disk._disconnect()


def _after_fork() -> None:
    for disk in _forking:
        disk._lock.release()
    _forking.clear()
    _fork.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
