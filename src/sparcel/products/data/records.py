"""An append-only file of records, in memory or in a folder, which processes share."""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from threading import Lock
from weakref import finalize

import numpy as np
import numpy.typing as npt

UNIT = 64
"""Offsets and lengths of records are multiples of this."""
_LENGTH_BITS = 24
LARGEST = UNIT * ((1 << _LENGTH_BITS) - 1)
"""The most bytes of a record: a little less than 1 GiB."""


class Records(ABC):
    """An append-only file of records, and the index that tells where each sample's is.

    The file begins with an index of one word a sample, its entry, which is 0 without a record.
    Records follow in the order in which they came. An entry is written after its record, as a
    whole, so a process that is killed leaves no broken entry behind. Places of records are never
    used again, so an entry that is the same before and after its record was read has the right one.
    The file is closed when this object goes.

    Parameters
    ----------
    descriptor
        Of the open file.
    first
        Where records begin.
    """

    def __init__(self, descriptor: int, first: int) -> None:
        self.descriptor, self.first = descriptor, up_to(UNIT, first)
        finalize(self, os.close, descriptor)

    @abstractmethod
    def entry(self, place: int) -> int:
        """Return the entry of a sample."""

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return max(self.first, up_to(UNIT, os.fstat(self.descriptor).st_size))

    def read(self, place: int) -> npt.NDArray[np.uint8] | None:
        """Return a copy of the record of a sample, or what a torn file has left of it, or None."""
        if not (entry := self.entry(place)):
            return None
        offset, length = range_of(entry)
        record = np.empty(length, np.uint8)
        count = os.preadv(self.descriptor, [record.data], offset)
        return record[:count] if self.entry(place) == entry else None

    def reserve(self, length: int) -> int:
        """Return where so many bytes may be written; whoever calls this holds a lock."""
        offset = self.end
        os.truncate(self.descriptor, offset + up_to(UNIT, length))
        return offset

    def write(self, content: bytes, offset: int) -> None:
        """Write all of the content, which one call of the system may not do."""
        left = memoryview(content)
        while left:
            count = os.pwrite(self.descriptor, left, offset)
            left, offset = left[count:], offset + count


class ProcessLock:
    """Excludes other processes and threads; the system frees the lock of a killed process.

    While it holds the lock, the process must not close another descriptor of the same file: that
    would free the lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._threads, self._pid = Lock(), os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():  # a thread of the parent may have held it in the fork
            self._threads, self._pid = Lock(), os.getpid()
        self._threads.acquire()
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        self._threads.release()


def entry_of(offset: int, length: int) -> int:
    """Return the entry of a record that begins there and has so many bytes."""
    return (offset // UNIT) << _LENGTH_BITS | up_to(UNIT, length) // UNIT


def range_of(entry: int) -> tuple[int, int]:
    """Return the offset and the length of an entry's record."""
    return (entry >> _LENGTH_BITS) * UNIT, (entry & (1 << _LENGTH_BITS) - 1) * UNIT


def up_to(multiple: int, nbytes: int) -> int:
    """Round up to a multiple."""
    return nbytes + -nbytes % multiple
