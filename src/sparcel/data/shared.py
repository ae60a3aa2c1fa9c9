"""Records in memory that processes of one machine share."""

from __future__ import annotations

import mmap
import os
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt

from sparcel.data.available import available
from sparcel.data.locks import ProcessLock
from sparcel.data.ranges import can_free, free, write
from sparcel.data.records import Record
from sparcel.errors import InputError, warn

TOKEN, LENGTH, LIMIT, START, USED, LOOKED_AT, HELD, SAID = range(8)
"""The first words of the file; `Shared.add` counts in those that follow."""
COUNTERS = slice(8, 11)
_WORDS = 64

_UNIT = 64
"""Offsets and lengths of records are multiples of this."""
_LENGTH_BITS = 24
_BARRED = 1
"""The entry of a sample that is not to be kept."""
_MOVED = 1 << 20
"""While records move, what is before them is freed in pieces of so many bytes."""
_STEP = 64 << 20
"""The system's free memory is looked at each time that so many bytes were taken."""


class Shared:
    """A key-value store in memory, by sample index.

    The store is a file without a name, which exists in memory alone. It begins with an index of one
    word a sample; records follow in the order in which they came. Nothing is evicted: a training
    reads all samples in turn, so of a set that does not fit, a fixed part serves more reads than
    the part that was read last. An entry is written after its record, in one store, so a process
    that is killed leaves no broken entry behind. Places of records are never used again, so an
    entry that is the same before and after its record was read has the right one.

    Other processes open the file as ``/proc/PID/fd/NUMBER`` of a process that has it. It goes when
    the last of them ends, in whichever way.

    Parameters
    ----------
    length
        Number of samples.
    limit
        Bytes that the file may take, the index included. With 0 there is no index, and counters
        alone are shared.

    Raises
    ------
    InputError
        When not even the index fits, or the system has no such files.
    """

    def __init__(self, length: int, limit: int) -> None:
        check(length, limit)
        records, token = index_bytes(length if limit else 0), secrets.randbits(62)
        values = (token, length if limit else 0, limit, records, records, records)
        try:
            descriptor = os.memfd_create("sparcel-samples")
            os.truncate(descriptor, records)
            os.pwrite(descriptor, np.array(values, np.uint64).data, 0)
            self._map(descriptor, records)
        except OSError as error:
            raise InputError(
                f"the memory that processes share can't be made: {error.strerror}; allow more open"
                " files, larger files or more memory (ulimit -a)"
            ) from error
        _attached[token] = self

    def _map(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        finalize(self, os.close, descriptor)
        mapped = mmap.mmap(descriptor, size)
        self.words: npt.NDArray[np.uint64] = np.frombuffer(mapped, np.uint64)
        self._index = self.words[_WORDS : _WORDS + int(self.words[LENGTH])]
        self._lock = ProcessLock(descriptor)

    @property
    def name(self) -> tuple[int, int, int]:
        """By which other processes find it: `attach`."""
        return os.getpid(), self._descriptor, int(self.words[TOKEN])

    def __reduce__(self) -> Any:
        return attach_or_do_without, self.name

    @property
    def used(self) -> int:
        """The bytes that it takes, or will when records that are under way have come."""
        first = index_bytes(len(self._index))
        return first + int(self.words[USED]) - int(self.words[START])

    def kept(self) -> int:
        """Return the number of samples that it has."""
        return int(np.count_nonzero(self._index > _BARRED))

    def get(self, place: int) -> Record | None:
        """Return a copy of the record of a sample, or None."""
        if not len(self._index) or (entry := int(self._index[place])) <= _BARRED:
            return None
        offset, length = _range_of(entry)
        record = np.empty(length, np.uint8)
        count = os.preadv(self._descriptor, [record.data], offset)
        return record if count == length and int(self._index[place]) == entry else None

    def wants(self, place: int) -> bool:
        """Tell whether there is room left, and this sample is not there."""
        return bool(len(self._index)) and self._has_room(place, 1)

    def put(self, place: int, record: bytes) -> bool:
        """Keep a record if there is room; tell whether the system had the memory for it."""
        units = -(-len(record) // _UNIT)
        if not self._has_room(place, units):
            return True
        with self._lock:
            if not self._has_room(place, units):  # another process was faster
                return True
            offset = int(self.words[USED])
            if offset + units * _UNIT > int(self.words[LOOKED_AT]):
                if available() < 2 * _STEP:
                    self.words[LIMIT] = 0
                    return False
                self.words[LOOKED_AT] = offset + _STEP
            self.words[USED] = offset + units * _UNIT
        try:
            write(self._descriptor, record + bytes(-len(record) % _UNIT), offset)
        except OSError:
            self.words[LIMIT] = 0
            return False
        with self._lock:
            if offset >= int(self.words[START]):
                self._index[place] = _entry(offset, units * _UNIT)
            else:  # `hold` was called in between, and nothing below START is of use
                free(self._descriptor, index_bytes(len(self._index)), int(self.words[START]))
        return True

    def _has_room(self, place: int, units: int) -> bool:
        fits = self.used + units * _UNIT <= int(self.words[LIMIT]) and units < 1 << _LENGTH_BITS
        return fits and not self._index[place]

    def hold(self, part: npt.NDArray[np.int64] | None) -> bool:
        """Keep samples of a part alone from now on, and forget all others; tell whether it can.

        It cannot where the system does not give back a part of a file. Then nothing is forgotten.

        Records that stay move up behind all others, so that what is before them can be freed.

        Parameters
        ----------
        part
            The places of the samples, in any order. The part that is held already stays as it is,
            so each process may say when it comes to it. None lets all samples be kept again, and
            forgets none.
        """
        if not len(self._index):
            return True
        if not can_free(self._descriptor):
            return False
        name = 0 if part is None else 1 + _number_of(part)
        with self._lock:
            if int(self.words[HELD]) == name:
                return True
            self.words[HELD] = name
            if part is None:
                self._index[self._index == _BARRED] = 0
                return True
            old, entries = self._index.copy(), np.full(len(self._index), _BARRED, np.uint64)
            entries[part] = 0
            self._index[:] = entries
            staying = np.flatnonzero((entries != _BARRED) & (old > _BARRED))
            self._move(staying[np.argsort(old[staying])], old)
        return True

    def _move(self, places: npt.NDArray[np.int64], entries: npt.NDArray[np.uint64]) -> None:
        """Move records, in the order in which they lie, behind all others, and free the rest."""
        freed, start = index_bytes(len(self._index)), int(self.words[USED])
        start += -start % mmap.ALLOCATIONGRANULARITY
        self.words[START] = self.words[USED] = start
        for place, entry in zip(places.tolist(), entries[places].tolist(), strict=True):
            offset, length = _range_of(entry)
            target = int(self.words[USED])
            try:
                write(self._descriptor, os.pread(self._descriptor, length, offset), target)
            except OSError:  # the system has no memory left
                break
            self.words[USED] = target + length
            self._index[place] = _entry(target, length)
            if offset - freed >= _MOVED:
                done = offset - offset % mmap.ALLOCATIONGRANULARITY
                free(self._descriptor, freed, done)
                freed = done
        free(self._descriptor, freed, start)

    def add(self, counts: tuple[int, int, int]) -> None:
        """Add to the counters that all processes share."""
        with self._lock:
            self.words[COUNTERS] += np.array(counts, np.uint64)

    def counts(self) -> tuple[int, int, int]:
        """Return these counters."""
        first, second, third = (int(count) for count in self.words[COUNTERS])
        return first, second, third

    def first_to_say(self, number: int) -> bool:
        """Tell whether no process has said this before; ``number`` is below 64."""
        with self._lock:
            said = int(self.words[SAID])
            self.words[SAID] = said | 1 << number
        return not said >> number & 1


def check(length: int, limit: int) -> None:
    """Raise an `InputError` if a `Shared` cannot be made."""
    if 0 < limit < index_bytes(length):
        raise InputError(
            f"memory must hold at least the index of {length} samples, {index_bytes(length)} bytes;"
            f" got {limit}; 0 keeps no samples in memory"
        )
    if not hasattr(os, "memfd_create"):
        raise InputError("Cached needs Linux, whose processes share memory without a name")


_attached: WeakValueDictionary[int, Shared] = WeakValueDictionary()
"""The stores that this process has open, by token, so that each is open once."""


def attach(pid: int, descriptor: int, token: int) -> Shared:
    """Open the store that another process has open, or return it if this process has.

    Raises
    ------
    InputError
        When that process is gone, or its files cannot be opened from here.
    """
    if token in _attached:
        return _attached[token]
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    hint = "make the Cached anew: its memory lives as long as the processes that use it"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"cannot open the memory of process {pid} ({error}); {hint}") from error
    header = np.frombuffer(_header(opened), np.uint64)
    if len(header) < _WORDS or int(header[TOKEN]) != token:
        os.close(opened)
        raise InputError(f"process {pid} no longer has the memory of this Cached; {hint}")
    shared = Shared.__new__(Shared)
    shared._map(opened, index_bytes(int(header[LENGTH])))
    return _attached.setdefault(token, shared)


def attach_or_do_without(pid: int, descriptor: int, token: int) -> Shared:
    """Open the store of another process for a worker; warn and keep nothing if that fails.

    A worker has no memory of its own, as all of the node's is that process's.
    """
    try:
        return attach(pid, descriptor, token)
    except InputError as error:
        warn(f"process {os.getpid()} keeps no samples in memory: {error}")
        return Shared(0, 0)


def _header(descriptor: int) -> bytes:
    """Return the first words of a file, or nothing if it is something else that has none."""
    try:
        content = os.pread(descriptor, 8 * _WORDS, 0)
    except OSError:
        return b""
    return content if len(content) == 8 * _WORDS else b""


def _entry(offset: int, length: int) -> int:
    """Return the entry of a record, of which both are multiples of ``_UNIT``."""
    return (offset // _UNIT) << _LENGTH_BITS | length // _UNIT


def _range_of(entry: int) -> tuple[int, int]:
    """Return the offset and the length of an entry's record."""
    return (entry >> _LENGTH_BITS) * _UNIT, (entry & (1 << _LENGTH_BITS) - 1) * _UNIT


def index_bytes(samples: int) -> int:
    """Return the bytes of an index, after which records begin."""
    taken = 8 * (_WORDS + samples)
    return taken + -taken % mmap.ALLOCATIONGRANULARITY


def _number_of(part: npt.NDArray[np.int64]) -> int:
    return int.from_bytes(blake2b(np.sort(part).tobytes(), digest_size=7).digest(), "big")
