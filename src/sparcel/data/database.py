"""The SQLite database of a folder's samples: who may make it anew, and when."""

from __future__ import annotations

import fcntl
import os
import random
import secrets
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from weakref import finalize

from sparcel._files import PATIENCE_S, create, lock, open_lock, open_regular, real, regular
from sparcel.errors import warn

NAME = "sparcel-samples"
OURS = 0x53504352
"""The application's number in a database's header, which tells whose it is."""
_OURS_AT, _HEADER, _MAGIC = 68, 100, b"SQLite format 3\0"
_TABLES = f"""
PRAGMA application_id = {OURS};
CREATE TABLE about (identity TEXT NOT NULL);
CREATE TABLE samples (place INTEGER PRIMARY KEY, crc INTEGER NOT NULL, record BLOB NOT NULL);
PRAGMA journal_mode = WAL;
"""

_BROKEN = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # a table is missing or another one
    sqlite3.SQLITE_TOOBIG,  # a length is wrong: larger records are not kept
)


class UnusableError(Exception):
    """The store cannot be used, or not any longer; the message says why."""


def is_broken(error: Exception) -> bool:
    """Tell whether the content is at fault.

    It is not when the disk is full or fails, a quota is exceeded, memory is short, a file cannot be
    opened or a lock does not come: then the samples may be as good as ever.
    """
    # Python's own errors have no code; the one that content can cause is a text that is not UTF-8.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return isinstance(error, sqlite3.Error) and code & 0xFF in _BROKEN


class Database:
    """The files of a store, and the lock that tells whether others use it.

    Whoever uses the database holds a shared lock (flock) on a file beside it. It is replaced under
    an exclusive lock, so by a process that is alone. What that file contains, if anything, is why
    the database must be made anew. No link in the folder is followed.

    Parameters
    ----------
    folder
        It is made if need be.
    identity
        What the samples are of.
    read_only
        Whether the folder can't be written. Then there is no lock. `examine` finds out.
    """

    def __init__(self, folder: Path, identity: str, read_only: bool = False) -> None:
        self.path, self.identity = folder / f"{NAME}.sqlite", identity
        self.read_only = read_only
        self._lock: int | None = None
        self._alone = False

    def __reduce__(self) -> Any:
        return Database, (self.path.parent, self.identity, self.read_only)

    def examine(self, count: int) -> tuple[str, list[tuple[int, bytes]]]:
        """Hold the lock, alone if nobody else does; return what is wrong, and some records.

        What is wrong is an empty string if the database can be used. Call `settle` next.

        Raises
        ------
        OSError, SparcelError, sqlite3.Error
            When it cannot be read now, and may be whole.
        """
        folder = self.path.parent
        real(folder).mkdir(parents=True, exist_ok=True)
        self.read_only = not os.access(folder, os.W_OK)
        try:
            self._hold(fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._alone = not self.read_only
        except BlockingIOError:
            self._hold(fcntl.LOCK_SH)
        if not self._is_there():
            return f"there is no {self.path}", []
        if self._lock is not None and (condemned := os.pread(self._lock, 1000, 0)):
            return condemned.decode(errors="replace"), []
        # Closing the file frees all locks of this process on it, so nothing else may have it open.
        if (self._alone or self.read_only) and not _is_ours(self.path):
            return f"{self.path} was not written by sparcel", []
        try:
            with closing(self.connect()) as database:
                return "", list(_random_records(database, count))
        except UnusableError as error:
            return str(error), []
        except sqlite3.Error as error:
            if not is_broken(error):
                raise
            return f"{self.path} is broken ({error})", []

    def settle(self, fault: str) -> None:
        """Make the database, or make it anew, if nobody else uses it; then hold the shared lock.

        A warning says why a database is replaced.

        Parameters
        ----------
        fault
            What is wrong with it, or an empty string.

        Raises
        ------
        UnusableError
            When it cannot be used as it is, and others use it or the folder is read-only.
        """
        if fault and not self._alone:
            why = "another run uses it, or an earlier Cached of this one"
            if self.read_only:
                why = "the folder is read-only"
            raise UnusableError(f"{fault}, and {why}")
        if fault:
            old = regular(self.path, links=False)
            if old:
                warn(f"{fault}; {self._remove()}")
            self._create(old)
        self._hold(fcntl.LOCK_SH)

    def leave(self) -> None:
        """Give the lock back; where it failed there is none, or it goes when the file is closed."""
        if self._lock is not None:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def connect(self) -> sqlite3.Connection:
        """Return a connection of this process, which holds the lock from now on.

        Raises
        ------
        UnusableError
            When there is no database, or it is of something else.
        OSError, SparcelError, sqlite3.Error
            When it is broken, as `is_broken` tells, or cannot be locked or opened.
        """
        if self._lock is None:  # this process was given the database by another one
            self._hold(fcntl.LOCK_SH)
        self._keep_readers_off()
        if self.read_only and self._beside("-wal").exists():
            raise UnusableError(f"{self.path} has a log, and the folder is read-only")
        mode = "mode=ro&immutable=1" if self.read_only else "mode=rw"
        database = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{mode}",
            timeout=PATIENCE_S,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        try:
            database.execute("PRAGMA synchronous = NORMAL")
            rows = database.execute("SELECT identity FROM about").fetchall()
            if rows != [(self.identity,)]:
                found = rows[0][0] if rows else "nothing"
                raise UnusableError(f"{self.path} has samples of {found}, not of {self.identity}")
        except BaseException as error:
            database.close()
            if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes a torn schema
                raise sqlite3.DatabaseError("its schema is torn") from error
            raise
        return database

    def condemn(self, why: str) -> None:
        """See to it that the database is made anew when a process is next alone with it."""
        if self._lock is not None:
            os.write(self._lock, why.encode())

    def _hold(self, how: int) -> None:
        """Hold the lock in this way from now on; wait for a process that makes the database."""
        if self.read_only:
            return
        path = self.path.with_name(f"{NAME}.lock")
        if self._lock is None:
            self._lock = open_lock(path)
            finalize(self, os.close, self._lock)
        lock(self._lock, path, how)

    def _keep_readers_off(self) -> None:
        """Let those alone open the file with SQLite's locks who may write to the database.

        SQLite gives it the database's mode where it is missing or empty, and whoever can read it
        can hold the locks. It gets its name once it is whole, because others may open it at once.
        """
        locks, part = self._beside("-shm"), self._beside(f"-shm.{secrets.token_hex(8)}.part")
        if not self._is_there() or self.read_only or locks.exists():
            return
        writers = self.path.stat().st_mode & 0o222
        with suppress(OSError):  # another process was faster, or there are no hard links
            try:
                file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with open(file, "wb") as made:
                    os.fchmod(file, writers | writers << 1)
                    made.write(b"\0")
                os.link(part, locks)  # closed, because closing frees the locks of this process
            finally:
                part.unlink(missing_ok=True)

    def _is_there(self) -> bool:
        """Tell whether there is a database; refuse what is no file in its place or its log's."""
        found = [regular(self._beside(name), links=False) for name in ("", "-wal", "-shm")]
        return found[0] is not None

    def _remove(self) -> str:
        """Remove the database with its log, or move another program's aside; say which."""
        files = [self._beside("-wal"), self._beside("-shm"), self.path]
        if _is_ours(self.path):
            self.condemn("it was being removed")
            for file in files:
                file.unlink(missing_ok=True)
            return "it is made anew"
        mark = f".{secrets.token_hex(4)}.foreign"
        for file in files:
            if file.exists():
                file.rename(file.with_name(file.name + mark))
        return f"it is now {self.path.name}{mark}, and a new one is made"

    def _create(self, old: os.stat_result | None) -> None:
        """Make an empty database like the old one, which has its name once it is whole."""
        assert self._lock is not None
        new = self._beside(".new")
        for suffix in (".new", ".new-wal", ".new-shm"):  # of a process that was killed here
            self._beside(suffix).unlink(missing_ok=True)
        create(new, old).close()
        with closing(sqlite3.connect(new, isolation_level=None)) as database:
            database.executescript(_TABLES)
            database.execute("INSERT INTO about VALUES (?)", (self.identity,))
        for name in ("-wal", "-shm"):  # SQLite would apply a log that was left to the new database
            self._beside(name).unlink(missing_ok=True)
        new.rename(self.path)
        os.truncate(self._lock, 0)

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)


def _is_ours(path: Path) -> bool:
    """Tell whether sparcel wrote a file, as its first bytes tell; a torn one may have few."""
    with open_regular(path, links=False) as file:
        header = file.read(_HEADER)
    if len(header) < _HEADER:
        return header.startswith(_MAGIC) or _MAGIC.startswith(header)
    return header.startswith(_MAGIC) and header[_OURS_AT:][:4] == OURS.to_bytes(4, "big")


def _random_records(database: sqlite3.Connection, count: int) -> Iterator[tuple[int, bytes]]:
    """Yield whole records at random; broken ones count as none."""
    (last,) = database.execute("SELECT max(place) FROM samples").fetchone()
    query = "SELECT place, crc, record FROM samples WHERE place >= ? LIMIT 1"
    for _ in range(count if last is not None else 0):
        for place, crc, record in database.execute(query, (random.randint(0, last),)).fetchall():
            if is_whole(place, crc, record):
                yield place, record


def is_whole(place: int, crc: int, record: object) -> bool:
    """Tell whether a record is as it was put; a torn file may make it text, or nothing."""
    return isinstance(record, bytes) and crc == checksum(place, record)


def checksum(place: int, record: bytes) -> int:
    """Return the checksum of a record at its place."""
    return zlib.crc32(record, place & 0xFFFFFFFF)
