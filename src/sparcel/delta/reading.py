"""The files of an entry in a store, which are read before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from sparcel.delta.files import File
from sparcel.delta.index import Entry
from sparcel.errors import FormatError, shown
from sparcel.stores import DoubtedStore, Ranged, Store, read_at_most


def read_ahead(
    store: Store, way: Sequence[Entry], ahead: int, most: int
) -> Iterator[tuple[Entry, Callable[[], list[File]]]]:
    """Yield each entry, and what returns its files, which are being read with those after it.

    Up to ``ahead`` entries are read at a time, with no more than ``most`` bytes together. Reads
    that are not asked for any more end by themselves.
    """
    if min(ahead, len(way)) == 1 or not isinstance(store, DoubtedStore):
        yield from ((entry, partial(files_of, store, entry, most, read_at_most)) for entry in way)
        return
    pool, left, size = ThreadPoolExecutor(ahead), deque(way), 0
    reading: deque[tuple[Entry, Future[list[File]]]] = deque()
    try:
        while left or reading:
            while left and len(reading) < ahead and (not size or size + left[0].bytes <= most):
                entry = left.popleft()
                size += entry.bytes
                reading.append((entry, pool.submit(files_of, store, entry, most, read_at_most)))
            entry, files = reading.popleft()
            yield entry, files.result
            size -= entry.bytes
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def files_of(
    store: Store,
    entry: Entry,
    most: int,
    read: Callable[[Store, str, int], memoryview | Ranged],
) -> list[File]:
    """Return the files of a delta or a whole model, read by `read_at_most` or as `ranged`."""
    files, left = [], min(entry.bytes, most)
    for name in entry.names:
        data = read(store, name, left)
        files.append(File(data, name))
        left -= len(data)
    return files


def check_stated(entry: Entry, files: list[File]) -> None:
    """Raise FormatError unless files state the versions that the index lists."""
    for file in files:
        base, version = entry.base and file.version("base"), file.version()
        if (base, version) != (entry.base, entry.version):
            of, instead = (f" of {one}" if one else "" for one in (base, entry.base))
            raise FormatError(
                f"{shown(file.name)} says that it makes version {version}{of}, and the index lists"
                f" {entry.version}{instead}"
            )
