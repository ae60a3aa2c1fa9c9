"""Records in memory that processes of one machine share."""

from __future__ import annotations

import mmap
import os
import secrets
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from sparcel.comm import Call, Communicator
from sparcel.data.available import available
from sparcel.data.memory_file import MemoryFile
from sparcel.errors import InputError, warn

TOKEN, LENGTH, LIMIT, START, USED, LOOKED_AT, SAID = range(7)
"""The first words of the file; `Shared.count` counts in those that follow."""
COUNTERS = slice(8, 11)
_WORDS = 64

_UNIT = 64
"""Offsets and lengths of records are multiples of this."""
_LENGTH_BITS = 24
_LARGEST = _UNIT << _LENGTH_BITS
"""Records are shorter than this."""
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
        Bytes that the file may take, the index included, as `check_memory` accepts them. With 0
        there is no index, and counters alone are shared.

    Raises
    ------
    InputError
        When the system refuses to make the file.
    """

    def __init__(self, length: int, limit: int) -> None:
        length = length if limit else 0
        first, token = index_bytes(length), secrets.randbits(62)
        words = np.array((token, length, limit, first, first, first), np.uint64)
        try:
            file = MemoryFile(os.memfd_create("sparcel-samples"))
            os.truncate(file.descriptor, first)
            file.write(words.tobytes(), 0)
            self._map(file, first)
        except OSError as error:
            raise InputError(
                f"the memory that processes share can't be made: {error.strerror}; allow more open"
                " files, larger files or more memory (ulimit -a)"
            ) from error
        _attached[token] = self

    @staticmethod
    def attached(pid: int, descriptor: int, token: int) -> Shared:
        """Open the store that another process has open, or return it if this process has.

        Raises
        ------
        InputError
            When that process is gone, or its files cannot be opened from here.
        """
        if token in _attached:
            return _attached[token]
        hint = "make the Cached anew: its memory lives as long as the processes that use it"
        try:
            file = MemoryFile(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise InputError(
                f"cannot open the memory of process {pid} ({error}); {hint}"
            ) from error
        try:
            header = os.pread(file.descriptor, 16, 0)
        except OSError:  # it is something that has no content
            header = b""
        found, length = np.frombuffer(header.ljust(16, b"\0"), np.uint64).tolist()
        if found != token:
            raise InputError(f"process {pid} no longer has the memory of this Cached; {hint}")
        shared = Shared.__new__(Shared)
        shared._map(file, index_bytes(length))
        return _attached.setdefault(token, shared)

    def _map(self, file: MemoryFile, first: int) -> None:
        self._file, self._first = file, first
        mapped = mmap.mmap(file.descriptor, first)
        self.words = memoryview(mapped).cast("Q")[:_WORDS]
        self._index = np.frombuffer(mapped, np.uint64, self.words[LENGTH], 8 * _WORDS)

    @property
    def name(self) -> tuple[int, int, int]:
        """By which other processes find it: `attached`."""
        return os.getpid(), self._file.descriptor, self.words[TOKEN]

    def __reduce__(self) -> Any:
        return _attached_or_empty, self.name

    @property
    def used(self) -> int:
        """The bytes that it takes, or will when records that are under way have come."""
        return self._first + self.words[USED] - self.words[START]

    def kept(self) -> int:
        """Return the number of samples that it has."""
        return int(np.count_nonzero(self._index > _BARRED))

    def get(self, place: int) -> npt.NDArray[np.uint8] | None:
        """Return a copy of the record of a sample, or None."""
        if not len(self._index) or (entry := int(self._index[place])) <= _BARRED:
            return None
        offset, length = _range_of(entry)
        record = np.empty(length, np.uint8)
        count = os.preadv(self._file.descriptor, [record.data], offset)
        return record if count == length and int(self._index[place]) == entry else None

    def wants(self, place: int, length: int = _UNIT) -> bool:
        """Tell whether there is room left for a record, and this sample is not there."""
        fits = self.used + length <= self.words[LIMIT] and length < _LARGEST
        return bool(len(self._index)) and fits and not self._index[place]

    def put(self, place: int, record: bytes) -> bool:
        """Keep a record if there is room; tell whether the system had the memory for it."""
        length = len(record) + -len(record) % _UNIT
        with self._file.lock:
            if not self.wants(place, length):  # as another process was faster, say
                return True
            offset = self.words[USED]
            if offset + length > self.words[LOOKED_AT]:
                if available() < 2 * _STEP:
                    self.words[LIMIT] = 0
                    return False
                self.words[LOOKED_AT] = offset + _STEP
            self.words[USED] = offset + length
        try:
            self._file.write(record.ljust(length, b"\0"), offset)
        except OSError:
            self.words[LIMIT] = 0
            return False
        with self._file.lock:
            if offset >= self.words[START]:
                self._index[place] = _entry(offset, length)
            else:  # `hold` was called in between, and nothing below START is of use
                self._file.free(self._first, self.words[START])
        return True

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
        if not self._file.can_free():
            return False
        with self._file.lock:
            old = self._index.copy()
            if part is None:
                self._index[old == _BARRED] = 0
                return True
            is_in_part = np.zeros(len(old), bool)
            is_in_part[part] = True
            if not np.array_equal(is_in_part, old != _BARRED):
                self._index[:] = np.where(is_in_part, 0, _BARRED)
                staying = np.flatnonzero(is_in_part & (old > _BARRED))
                self._move(staying[np.argsort(old[staying])], old)
        return True

    def _move(self, places: npt.NDArray[np.int64], entries: npt.NDArray[np.uint64]) -> None:
        """Move records, in the order in which they lie, behind all others, and free the rest."""
        freed, start = self._first, _to_pages(self.words[USED])
        self.words[START] = self.words[USED] = start
        for place, entry in zip(places.tolist(), entries[places].tolist(), strict=True):
            offset, length = _range_of(entry)
            target = self.words[USED]
            try:
                self._file.write(os.pread(self._file.descriptor, length, offset), target)
            except OSError:  # the system has no memory left
                break
            self.words[USED] = target + length
            self._index[place] = _entry(target, length)
            if offset - freed >= _MOVED:
                done = offset - offset % mmap.ALLOCATIONGRANULARITY
                self._file.free(freed, done)
                freed = done
        self._file.free(freed, start)

    def count(self, *counts: int) -> None:
        """Add to the counters that all processes share."""
        with self._file.lock:
            for number, count in enumerate(counts, COUNTERS.start):
                self.words[number] += count

    def counts(self) -> tuple[int, int, int]:
        """Return these counters."""
        first, second, third = self.words[COUNTERS]
        return first, second, third

    def first_to_say(self, number: int) -> bool:
        """Tell whether no process has said this before; ``number`` is below 64."""
        with self._file.lock:
            said = self.words[SAID]
            self.words[SAID] = said | 1 << number
        return not said >> number & 1


_attached: WeakValueDictionary[int, Shared] = WeakValueDictionary()
"""The stores that this process has open, by token, so that each is open once."""


def _attached_or_empty(pid: int, descriptor: int, token: int) -> Shared:
    """Open the store of another process for a worker; warn and keep nothing if that fails.

    A worker has no memory of its own, as all of the node's is that process's.
    """
    try:
        return Shared.attached(pid, descriptor, token)
    except InputError as error:
        warn(f"process {os.getpid()} keeps no samples in memory: {error}")
        return Shared(0, 0)


def shared_by_node(comm: Communicator, length: int, limit: int, dataset: str) -> Shared:
    """Return the memory of this rank's node; all ranks call.

    The first rank of each node makes it. Ranks that cannot open it, such as those in another
    container, have their share of ``limit`` to themselves.

    Raises
    ------
    MismatchError
        When ranks give another ``length``, ``limit`` or ``dataset``, which tells what is kept.
    """

    def job() -> Shared:
        nodes = comm.nodes()
        first = nodes.index(nodes[comm.rank])
        made = Shared(length, limit) if comm.rank == first else None
        name = (0, 0, 0) if made is None else made.name
        names = [comm.gather_numbers(number)[first] for number in name]
        if made is None:
            try:
                made = Shared.attached(*names)
            except InputError as error:
                share = limit // nodes.count(nodes[comm.rank])
                warn(
                    f"rank {comm.rank} cannot share the memory of rank {first}, which is on the"
                    f" same node ({error}); it has {share} bytes of its own"
                )
                made = Shared(length, share if share >= index_bytes(length) else 0)
        comm.gather_numbers(0)  # no rank ends before the others have opened what it made
        return made

    arguments = {"length": length, "memory": limit, "dataset": dataset}
    return comm.call(Call.of("cached", arguments), job)


def check_memory(length: int, limit: int) -> None:
    """Raise an `InputError` if the memory of a `Shared` cannot be made."""
    if 0 < limit < index_bytes(length):
        raise InputError(
            f"memory must hold at least the index of {length} samples, {index_bytes(length)} bytes;"
            f" got {limit}; 0 keeps no samples in memory"
        )
    if not hasattr(os, "memfd_create"):
        raise InputError("Cached needs Linux, whose processes share memory without a name")


def index_bytes(samples: int) -> int:
    """Return the bytes of an index, after which records begin."""
    return _to_pages(8 * (_WORDS + samples))


def _to_pages(nbytes: int) -> int:
    return nbytes + -nbytes % mmap.ALLOCATIONGRANULARITY


def _entry(offset: int, length: int) -> int:
    """Return the entry of a record, of which both are multiples of ``_UNIT``."""
    return (offset // _UNIT) << _LENGTH_BITS | length // _UNIT


def _range_of(entry: int) -> tuple[int, int]:
    """Return the offset and the length of an entry's record."""
    return (entry >> _LENGTH_BITS) * _UNIT, (entry & (1 << _LENGTH_BITS) - 1) * _UNIT
