"""Records in a folder of a local disk, which survive runs: who may make them anew, and when."""

from __future__ import annotations

import fcntl
import os
import random
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from sparcel.core._files import lock, locked, open_lock, real, regular, replacing
from sparcel.errors import SparcelError, warn
from sparcel.products.data.records import LARGEST, UNIT, Records, entry_of, up_to

NAME = "sparcel-samples"

_MAGIC = b"sparcel samples of "
_CRC_BYTES = 4


class UnusableError(Exception):
    """The store cannot be used, or not any longer; the message says why."""


class _ForeignError(UnusableError):
    """The file is another program's."""


class _File(Records):
    """A file of records that end with a checksum, as the machine may crash while they are written.

    It begins with a line that tells what the samples are of; the index follows.

    It is not mapped: where a disk is full or a file was cut off, that would end the process.
    Whoever appends holds a lock (flock) on a file beside it, because who may only read this one
    could lock it, too.
    """

    def __init__(self, path: Path, identity: str, length: int, read_only: bool) -> None:
        regular(path, links=False)
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags | (os.O_RDONLY if read_only else os.O_RDWR))
        head = _line(identity)
        self._index_at = up_to(UNIT, len(head))
        super().__init__(file, self._index_at + 8 * length)
        self._lock = path.with_name(f"{NAME}.append.lock")
        found = os.pread(file, len(head) + 1000, 0)
        if found[: len(_MAGIC)] != _MAGIC[: len(found)]:
            raise _ForeignError(f"{path} was not written by sparcel")
        if not found.startswith(head):
            what = found[len(_MAGIC) :].partition(b"\n")[0].decode(errors="replace")
            raise UnusableError(f"{path} has samples of {what}, not of {identity}")

    @staticmethod
    def make(path: Path, identity: str) -> None:
        """Make a file without records, like the one that it takes the place of."""
        with replacing(path, links=False, lasting=False) as file:
            file.write(_line(identity))

    def entry(self, place: int) -> int:
        return int.from_bytes(os.pread(self.descriptor, 8, self._index_at + 8 * place), "little")

    def enter(self, place: int, entry: int) -> None:
        """Write the entry of a sample; 0 if there is none any longer."""
        self.write(entry.to_bytes(8, "little"), self._index_at + 8 * place)

    def put(self, records: Mapping[int, bytes]) -> None:
        """Append records, one after the other, of samples that have none."""
        new = {
            place: _with_checksum(place, record)
            for place, record in records.items()
            if len(record) + _CRC_BYTES <= LARGEST and not self.entry(place)
        }
        lengths = [*map(len, new.values())]
        with locked(self._lock):
            offset = self.reserve(sum(lengths))
        self.write(b"".join(new.values()), offset)
        for place, length in zip(new, lengths, strict=True):
            self.enter(place, entry_of(offset, length))
            offset += length

    def get(self, place: int) -> npt.NDArray[np.uint8] | None:
        """Return the record of a sample, which is empty where it was torn, or None."""
        record = self.read(place)
        if record is None:
            return None
        content, crc = record[:-_CRC_BYTES], record[-_CRC_BYTES:].tobytes()
        return content if _checksum(place, content) == crc else content[:0]

    def at_random(self, count: int) -> Iterator[tuple[int, bytes]]:
        """Yield whole records at random, of so many samples; torn ones count as none."""
        content = os.pread(self.descriptor, self.first - self._index_at, self._index_at)
        places = np.flatnonzero(np.frombuffer(content, "<u8", len(content) // 8)).tolist()
        for place in random.sample(places, min(count, len(places))):
            record = self.get(place)
            if record is not None and len(record):
                yield place, record.tobytes()


def _line(identity: str) -> bytes:
    return _MAGIC + identity.encode() + b"\n"


def _with_checksum(place: int, record: bytes) -> bytes:
    content = record.ljust(up_to(UNIT, len(record) + _CRC_BYTES) - _CRC_BYTES, b"\0")
    return content + _checksum(place, content)


def _checksum(place: int, content: Any) -> bytes:
    return zlib.crc32(content, place & 0xFFFFFFFF).to_bytes(_CRC_BYTES, "little")


class Disk:
    """A key-value store in a folder, by sample index; call `open` first, or unpickle an open one.

    Any number of processes and runs may use it at once. Whoever uses it holds a shared lock (flock)
    on a file beside it. It is replaced under an exclusive lock, so by a process that is alone. What
    that file contains, if anything, is why the records must be made anew. No link in the folder is
    followed.

    Parameters
    ----------
    folder
        It is made if need be.
    identity
        What the samples are of.
    length
        Their number.
    read_only
        Whether nothing can be put, as in a folder that can't be written, which then has no lock.
        `open` finds out.
    """

    def __init__(self, folder: Path, identity: str, length: int, read_only: bool = False) -> None:
        self.path, self.read_only = folder / f"{NAME}.records", read_only
        self._identity, self._length = identity, length
        self._file: _File | None = None
        self._lock: int | None = None

    def __reduce__(self) -> Any:
        return Disk, (self.path.parent, self._identity, self._length, self.read_only)

    def open(self, is_alike: Callable[[int, bytes], bool], looks: int) -> None:
        """Make the file if there is none, or none of these samples, and open it.

        A warning says why a file is replaced.

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
        try:
            with self._errors():
                is_alone = self._take()
                fault, is_foreign = self._fault()
                looked = [] if fault else [*self._opened().at_random(looks)]
            changed = [place for place, record in looked if not is_alike(place, record)]
            with self._errors():
                if changed:
                    self._condemn(f"sample {changed[0]} of the source changed")
                    fault = f"sample {changed[0]} of the source is not the one of {self.path}"
                if fault:
                    self._make_anew(fault, is_foreign, is_alone)
                self._hold(fcntl.LOCK_SH)
                self._opened()
        except BaseException:
            self._leave()  # a traceback may keep this object, and others wait for the lock
            raise

    @property
    def used(self) -> int:
        """The bytes of the file."""
        try:
            return self.path.stat().st_size
        except OSError:  # people remove the folder
            return 0

    def get(self, places: Iterable[int]) -> dict[int, npt.NDArray[np.uint8]]:
        """Return the records that are there, by place; torn ones are empty.

        Raises
        ------
        UnusableError
            When the file cannot be read.
        """
        with self._errors():
            file = self._opened()
            records = {place: file.get(place) for place in places}
        return {place: record for place, record in records.items() if record is not None}

    def drop(self, places: Iterable[int]) -> None:
        """Forget records that are of no use, so that others take their place."""
        with suppress(UnusableError), self._errors():
            for place in () if self.read_only else places:
                self._opened().enter(place, 0)

    def put(self, records: Mapping[int, bytes]) -> None:
        """Keep records; those of 1 GiB or more are never kept.

        Raises
        ------
        UnusableError
            When they cannot be written: the disk is full, say. What is there can still be read.
        """
        with self._errors():
            self._opened().put(records)

    def _take(self) -> bool:
        """Hold the lock, alone if nobody else does; tell whether it is."""
        folder = self.path.parent
        real(folder).mkdir(parents=True, exist_ok=True)
        self.read_only = not os.access(folder, os.W_OK)
        try:
            self._hold(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._hold(fcntl.LOCK_SH)
            return False
        return not self.read_only

    def _fault(self) -> tuple[str, bool]:
        """Say what is wrong with the file, if anything is, and whether it is another program's."""
        if regular(self.path, links=False) is None:
            return f"there is no {self.path}", False
        try:
            self._opened()
        except UnusableError as error:
            return str(error), isinstance(error, _ForeignError)
        condemned = b"" if self._lock is None else os.pread(self._lock, 1000, 0)
        return condemned.decode(errors="replace"), False

    def _make_anew(self, fault: str, is_foreign: bool, is_alone: bool) -> None:
        """Make the file, or make it anew, if nobody else uses it."""
        if not is_alone:
            why = "another run uses it, or an earlier Cached of this one"
            if self.read_only:
                why = "the folder is read-only"
            raise UnusableError(f"{fault}, and {why}")
        aside = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.foreign")
        if is_foreign:
            self.path.rename(aside)
            warn(f"{fault}; it is now {aside.name}, and a new one is made")
        elif self.path.exists():
            warn(f"{fault}; it is made anew")
        _File.make(self.path, self._identity)
        self._file = None
        if self._lock is not None:
            os.truncate(self._lock, 0)

    def _opened(self) -> _File:
        """Return the file, with the lock; a process that was given this object opens it here."""
        if self._file is None:
            if self._lock is None:
                self._hold(fcntl.LOCK_SH)
            self._file = _File(self.path, self._identity, self._length, self.read_only)
        return self._file

    def _condemn(self, why: str) -> None:
        """See to it that the file is made anew when a process is next alone with it."""
        if self._lock is not None:
            os.write(self._lock, why.encode())

    def _hold(self, how: int) -> None:
        """Hold the lock in this way from now on; wait for a process that makes the file."""
        if self.read_only:
            return
        path = self.path.with_name(f"{NAME}.lock")
        if self._lock is None:
            self._lock = open_lock(path)
            finalize(self, os.close, self._lock)
        lock(self._lock, path, how)

    def _leave(self) -> None:
        """Give the lock back; where it failed there is none, or it goes when the file is closed."""
        self._file = None
        if self._lock is not None:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of the disk into an `UnusableError`."""
        try:
            yield
        except (OSError, SparcelError) as error:
            why = str(error) if isinstance(error, SparcelError) else f"{self.path}: {error}"
            raise UnusableError(why) from error
