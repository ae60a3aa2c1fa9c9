"""Records in memory that processes of one machine share, and how much memory is left."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from sparcel.core.comm import Call, Communicator
from sparcel.errors import InputError, warn
from sparcel.products.data.records import (
    LARGEST,
    UNIT,
    ProcessLock,
    Records,
    entry_of,
    range_of,
    up_to,
)

TOKEN, LENGTH, LIMIT, START, LOOKED_AT, SAID, MOVING = range(7)
"""The first words of the file, the last of which tells that `Shared.hold` has begun and not ended;
`Shared.count` counts in those that follow."""
COUNTERS = slice(7, 10)
_WORDS = 64

_BARRED = entry_of(UNIT, 0)
"""The entry of a sample that is not to be kept."""
_MOVED = 1 << 20
"""While records move, what is before them is freed in pieces of so many bytes."""
_STEP = 64 << 20
"""The system's free memory is looked at each time that so many bytes were taken."""

_PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of linux/falloc.h."""
_NOWHERE = 1 << 62
"""An offset that no file reaches."""
_libc = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "fallocate"):
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Shared(Records):
    """A key-value store in memory, by sample index.

    The store is a file without a name, which exists in memory alone. Nothing is evicted: a training
    reads all samples in turn, so of a set that does not fit, a fixed part serves more reads than
    the part that was read last.

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
        try:
            super().__init__(os.memfd_create("sparcel-samples"), first)
            os.truncate(self.descriptor, first)
            self.write(np.array((token, length, limit, first, first), np.uint64).tobytes(), 0)
            self._map()
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
            file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(
                f"cannot open the memory of process {pid} ({error}); {hint}"
            ) from error
        try:
            header = os.pread(file, 16, 0)
        except OSError:  # it is something that has no content
            header = b""
        found, length = np.frombuffer(header.ljust(16, b"\0"), np.uint64).tolist()
        if found != token:
            os.close(file)
            raise InputError(f"process {pid} no longer has the memory of this Cached; {hint}")
        shared = Shared.__new__(Shared)
        Records.__init__(shared, file, index_bytes(length))
        shared._map()
        kept = _attached.setdefault(token, shared)
        if kept is not shared:  # another thread was first, whose locks this descriptor's end frees
            kept._twins.append(shared)
        return kept

    def _map(self) -> None:
        self._twins = list[Shared]()
        self.lock = ProcessLock(self.descriptor)
        mapped = mmap.mmap(self.descriptor, self.first)
        self.words = memoryview(mapped).cast("Q")[:_WORDS]
        self.index = np.frombuffer(mapped, np.uint64, self.words[LENGTH], 8 * _WORDS)

    @property
    def name(self) -> tuple[int, int, int]:
        """By which other processes find it: `attached`."""
        return os.getpid(), self.descriptor, self.words[TOKEN]

    def __reduce__(self) -> Any:
        return _attached_or_empty, self.name

    def entry(self, place: int) -> int:
        """Return the entry of a sample."""
        return int(self.index[place])

    @property
    def used(self) -> int:
        """The bytes that it takes, or will when records that are under way have come."""
        return self.first + self.end - self.words[START]

    def kept(self) -> int:
        """Return the number of samples that it has."""
        return int(np.count_nonzero(self.index > _BARRED))

    def get(self, place: int) -> npt.NDArray[np.uint8] | None:
        """Return a copy of the record of a sample, or None."""
        record = self.read(place) if len(self.index) else None
        return record if record is not None and len(record) else None

    def wants(self, place: int, length: int = UNIT) -> bool:
        """Tell whether there is room left for a record, and this sample is not there."""
        fits = self.used + up_to(UNIT, length) <= self.words[LIMIT] and length <= LARGEST
        return bool(len(self.index)) and fits and not self.index[place]

    def put(self, place: int, record: bytes) -> bool:
        """Keep a record if there is room; tell whether the system had the memory for it."""
        try:
            with self.lock:
                if not self.wants(place, len(record)):  # as another process was faster, say
                    return True
                offset = self.reserve(len(record))
                if offset + len(record) > self.words[LOOKED_AT]:
                    if available() < 2 * _STEP:
                        raise MemoryError
                    self.words[LOOKED_AT] = offset + _STEP
            self.write(record, offset)
        except (OSError, MemoryError):
            self.words[LIMIT] = 0
            return False
        with self.lock:
            if offset >= self.words[START]:
                self.index[place] = entry_of(offset, len(record))
            else:  # `hold` was called in between, and nothing below START is of use
                self._free(self.first, self.words[START])
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
        if not len(self.index):
            return True
        if not self._can_free():
            return False
        with self.lock:
            old = self.index.copy()
            is_in_part = np.full(len(old), part is None)
            if part is not None:
                is_in_part[part] = True
            is_held = part is None or np.array_equal(is_in_part, old != _BARRED)
            if is_held and not self.words[MOVING]:  # or whoever moved records was killed
                self.index[is_in_part & (old == _BARRED)] = 0
                return True
            self.words[MOVING] = 1
            self.index[:] = np.where(is_in_part, 0, _BARRED)
            staying = np.flatnonzero(is_in_part & (old > _BARRED))
            self._move(staying[np.argsort(old[staying])], old)
            self.words[MOVING] = 0
        return True

    def _move(self, places: npt.NDArray[np.int64], entries: npt.NDArray[np.uint64]) -> None:
        """Move records, in the order in which they lie, behind all others, and free the rest."""
        freed, start = self.first, _to_pages(self.end)
        os.truncate(self.descriptor, start)
        self.words[START] = start
        for place, entry in zip(places.tolist(), entries[places].tolist(), strict=True):
            offset, length = range_of(entry)
            try:
                target = self.reserve(length)
                self.write(os.pread(self.descriptor, length, offset), target)
            except OSError:  # the system has no memory left
                break
            self.index[place] = entry_of(target, length)
            if offset - freed >= _MOVED:
                done = offset - offset % mmap.ALLOCATIONGRANULARITY
                self._free(freed, done)
                freed = done
        self._free(freed, start)

    def _free(self, start: int, end: int) -> None:
        """Give a range back to the system; it reads as zeros from then on."""
        if end > start and _libc.fallocate(self.descriptor, _PUNCH_HOLE, start, end - start):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _can_free(self) -> bool:
        """Tell whether the system can give back a range of the file; some sandboxes cannot."""
        try:
            # Not at the file's end, where another process may be writing.
            self._free(_NOWHERE, _NOWHERE + 1)
        except (OSError, AttributeError):
            return False
        return True

    def count(self, *counts: int) -> None:
        """Add to the counters that all processes share."""
        with self.lock:
            for number, count in enumerate(counts, COUNTERS.start):
                self.words[number] += count

    def counts(self) -> tuple[int, int, int]:
        """Return these counters."""
        first, second, third = self.words[COUNTERS]
        return first, second, third

    def first_to_say(self, number: int) -> bool:
        """Tell whether no process has said this before; ``number`` is below 64."""
        with self.lock:
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
    return up_to(mmap.ALLOCATIONGRANULARITY, nbytes)


_CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""By version of cgroups: the folder, its files of limit and use, and what can be taken back."""


def available(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still get without swapping or being killed."""
    return min([*_of_machine(root), *_of_cgroups(root)], default=1 << 62)


def _of_machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield what each cgroup leaves that this process is in; a container may not show all."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        for folder, *files in _CGROUPS:
            if folder in controllers.split(","):
                top = root / "sys/fs/cgroup" / folder
                path = top / name.lstrip("/")
                for place in (path, *path.parents):
                    if place.is_relative_to(top):
                        yield from _left_in(place, *files)


def _left_in(place: Path, limit: str, use: str, cached: str) -> Iterator[int]:
    """Yield what one cgroup leaves; nothing for the root, which has no limit."""
    most, used = _lines(place / limit), _lines(place / use)
    stat = dict(line.split() for line in _lines(place / "memory.stat"))
    if most and used and most != ["max"]:
        yield int(most[0]) - int(used[0]) + int(stat.get(cached, 0))


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; none if it is not there, or not in this container's view."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
