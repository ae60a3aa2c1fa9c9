"""Rows in a file that is mapped into memory, so that each rank reads only what it uses.

The file consists of

- the magic, the version, the header's checksum, where the header begins and how long it is:
  integers of 4, 4, 8 and 8 bytes, little-endian;
- arrays, each at a multiple of 64 bytes, in the byte order of the machine: columns, values,
  offsets, and labels, or for labels that are texts their codes: places in a list of classes;
- the header, in JSON, which comes last because lengths are known last. It has the byte order,
  dimensions, fingerprint, classes, and of each array its dtype, length, place, and the CRC-32 of
  every `CHECKED_BYTES` of it. So a rank that maps its share checks its share alone.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import sys
import zlib
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple, Self

import numpy as np

from sparcel.core._checks import checked_whole
from sparcel.core._files import open_regular, replacing
from sparcel.errors import FormatError, InputError
from sparcel.products.rows.files import Paths, files_of
from sparcel.products.rows.rows import Array, Rows, join

MAGIC, VERSION = b"\x93SPARCEL", 2
START = struct.Struct("<8sIIQQ")
ALIGNMENT = 64
CHECKED_BYTES = 1 << 20
_MOST_HEADER = 1 << 30
"""Bytes, so that garbage of any size is told at once: a cache of 10 TB has about a tenth of it."""
_PARTS, _PART_BYTES = 3, 4096
"""How many parts of a source are looked at, evenly from its beginning to its end; their size."""


class BrokenCacheError(InputError):
    """A file is a cache of rows, and not whole."""


class _Cache(NamedTuple):
    """A cache that is mapped into memory."""

    path: Path
    header: dict[str, Any]
    content: mmap.mmap

    def array(self, name: str) -> Array:
        """Return an array of the cache."""
        entry = self.header["arrays"][name]
        return np.frombuffer(self.content, entry["dtype"], entry["length"], entry["place"])

    def rows(self) -> Rows:
        """Return all rows; labels that are texts by their codes."""
        arrays = {name: self.array(name) for name in self.header["arrays"]}
        labels = arrays.get("labels", arrays.get("codes"))
        entries = arrays["offsets"], arrays["columns"], arrays["values"]
        return Rows(*entries, self.header["dimensions"], labels)

    def with_texts(self, rows: Rows) -> Rows:
        """Return rows with the texts of labels for their codes."""
        if "codes" not in self.header["arrays"]:
            return rows
        return replace(rows, labels=np.array(self.header["classes"], np.str_)[rows.labels])

    def check(self, name: str, start: int, stop: int) -> None:
        """Compare the checksums of an array's bytes around its elements ``[start, stop)``."""
        array, crc32 = self.array(name), self.header["arrays"][name]["crc32"]
        data, size = array.view(np.uint8), array.itemsize
        for block in range(start * size // CHECKED_BYTES, -(-stop * size // CHECKED_BYTES)):
            part = data[block * CHECKED_BYTES : (block + 1) * CHECKED_BYTES]
            if zlib.crc32(part.data) != crc32[block]:
                raise _broken(self.path, f"the checksum of its {name} is wrong")


def fingerprint(paths: Paths, **settings: object) -> str:
    """Describe what a cache is made of: files, and settings.

    Files are known by their names, sizes, times of change, and a few of their bytes: archives and
    downloads may leave other files of the same name and size with the same time.

    Parameters
    ----------
    paths
        The sources; their folders do not count, so all may move together.
    **settings
        What else the rows depend on, of types that JSON knows.

    Raises
    ------
    InputError
        When a file cannot be read.
    """
    files = [_described(path) for path in files_of(paths)]
    return json.dumps({"files": files, "settings": settings}, sort_keys=True)


def _described(path: Path) -> list[str | int]:
    try:
        with path.open("rb") as file:
            stat, crc32 = os.fstat(file.fileno()), 0
            for part in range(_PARTS):
                file.seek(max(0, stat.st_size - _PART_BYTES) * part // (_PARTS - 1))
                crc32 = zlib.crc32(file.read(_PART_BYTES), crc32)
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from error
    return [path.name, stat.st_size, stat.st_mtime_ns, crc32]


def holds(path: str | os.PathLike[str], fingerprint: str) -> bool:
    """Tell whether a file is a cache of this, and as long as it should be."""
    try:
        found = _open(Path(path))
    except BrokenCacheError:
        return False
    return found is not None and found.header["fingerprint"] == fingerprint


def load(
    path: str | os.PathLike[str], fingerprint: str | None = None, rank: int = 0, ranks: int = 1
) -> Rows | None:
    """Map a cache into memory, or a rank's share of it, and compare checksums.

    Parameters
    ----------
    path
        What `save` or a `CacheWriter` wrote.
    fingerprint
        What the cache must be made of; None for anything.
    rank, ranks
        Which of so many shares; see `shard`.

    Returns
    -------
    Rows or None
        Read-only arrays; the system reads them from the file as they are used. None if there is no
        such file, or it is of other sources, another version or the other byte order.

    Raises
    ------
    InputError
        When the file is broken: in its length, its header, its offsets or the share that is mapped.
    """
    cache = _open(Path(path))
    if cache is None or fingerprint not in (None, cache.header["fingerprint"]):
        return None
    rows = cache.rows()
    cache.check("offsets", 0, len(rows) + 1)
    start, stop = _run(rows, rank, ranks)
    entries = int(rows.offsets[start]), int(rows.offsets[stop])
    for name in cache.header["arrays"].keys() - {"offsets"}:
        cache.check(name, *(entries if name in ("columns", "values") else (start, stop)))
    return cache.with_texts(rows if ranks == 1 else rows.slice(start, stop))


def mapped(file: IO[bytes]) -> Rows:
    """Map what a `CacheWriter` of this process wrote to an open file, which may be closed then."""
    cache = _content(Path(str(file.name)), file)
    assert cache is not None, "written by this process"
    return cache.with_texts(cache.rows())


def shard(rows: Rows, rank: int, ranks: int) -> Rows:
    """Return one of ``ranks`` runs of consecutive rows, as views, balanced by their entries.

    A row counts as one more than its entries. Of the offsets only few are read to find the runs.
    """
    return rows.slice(*_run(rows, rank, ranks))


def _run(rows: Rows, rank: int, ranks: int) -> tuple[int, int]:
    """Return where a rank's run of rows begins and ends."""
    checked_whole(ranks, "ranks", at_least=1)
    checked_whole(rank, "rank", at_least=0, at_most=ranks - 1)
    total = rows.nnz + len(rows)

    def first(part: int) -> int:
        places = range(len(rows) + 1)
        return bisect_left(places, total * part, key=lambda i: (int(rows.offsets[i]) + i) * ranks)

    return first(rank), first(rank + 1)


def _open(path: Path) -> _Cache | None:
    """Read the header and map the file, unless there is none for this version and machine."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return None
    except (OSError, FormatError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path} can't be read: {why}") from error
    with file:
        return _content(path, file)


def _content(path: Path, file: IO[bytes]) -> _Cache | None:
    file.seek(0)
    start = file.read(START.size)
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        raise InputError(f"{path} is no cache of rows; give the cache another path")
    if len(start) < START.size:
        raise _broken(path, "its length is not what it says")
    _, version, crc32, place, length = START.unpack(start)
    if version != VERSION:
        return None
    if place + length != os.fstat(file.fileno()).st_size or length > _MOST_HEADER:
        raise _broken(path, "its length is not what it says")
    file.seek(place)
    text = file.read(length)
    if zlib.crc32(text) != crc32:
        raise _broken(path, "the checksum of its header is wrong")
    header = json.loads(text)
    if header["byteorder"] != sys.byteorder:
        return None
    return _Cache(path, header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _broken(path: Path, why: str) -> BrokenCacheError:
    return BrokenCacheError(f"{path} is broken: {why}; remove it, so that it is made anew")


def save(path: str | os.PathLike[str], rows: Rows, fingerprint: str) -> None:
    """Write rows to a cache; see `CacheWriter`."""
    with CacheWriter(path, fingerprint) as writer:
        writer.append(rows)


@dataclass
class _Section:
    """An array that is being written, in a file of its own until its place is known."""

    file: IO[bytes]
    dtype: np.dtype[Any]
    length: int = 0
    crc32: list[int] = field(default_factory=list)

    def write(self, part: Array) -> None:
        data = np.ascontiguousarray(part).view(np.uint8)
        self.file.write(data.data)
        done = self.length * self.dtype.itemsize % CHECKED_BYTES
        self.length += len(part)
        while len(data):
            now, data = data[: CHECKED_BYTES - done], data[CHECKED_BYTES - done :]
            before = self.crc32.pop() if done else 0
            self.crc32.append(zlib.crc32(now.data, before))
            done = 0


class CacheWriter:
    """Writes a cache piece by piece, so the rows need never be in memory together.

    `load` finds a whole cache or none, and processes may write the same cache at once; the last one
    wins. As a context manager the writer closes the cache, or drops it after an exception.

    Parameters
    ----------
    path
        Where the cache goes, in a folder that exists; or an empty binary file, open for reading and
        writing, which stays open.
    fingerprint
        A text that tells what the cache is made of; see `sparcel.rows.fingerprint`.
    """

    def __init__(self, path: str | os.PathLike[str] | IO[bytes], fingerprint: str) -> None:
        self._fingerprint, self._files = fingerprint, ExitStack()
        self._folder: Path | None = None
        if isinstance(path, str | os.PathLike):
            self._folder = Path(path).parent
            self._file = self._files.enter_context(replacing(Path(path)))
        else:
            self._file = path
        self._file.write(bytes(ALIGNMENT))
        self._arrays: dict[str, _Section] = {}
        self._classes: dict[str, int] = {}
        self._dimensions = 0

    def append(self, rows: Rows) -> None:
        """Add rows at the end. The cache has the dimensions of the part that has most.

        Raises
        ------
        InputError
            When the dtypes differ from those of the rows before, or only some have labels.
        """
        entries = self._arrays["columns"].length if self._arrays else 0
        parts = {
            "columns": rows.columns,
            "values": rows.values,
            "offsets": rows.offsets[1:] + entries,
            **self._labels(rows.labels),
        }
        if not self._arrays:
            for name, part in parts.items():
                self._arrays[name] = self._begun(name, part.dtype)
            self._arrays["offsets"].write(np.zeros(1, np.int64))
        if (found := _dtypes(parts)) != (begun := _dtypes(self._arrays)):
            raise InputError(f"all rows of a cache are alike, but {found} follow {begun}")
        for name, part in parts.items():
            self._arrays[name].write(part)
        self._dimensions = max(self._dimensions, int(rows.dimensions))

    def _begun(self, name: str, dtype: np.dtype[Any]) -> _Section:
        """Return where to write an array; columns, half of all, are where they belong at once."""
        if name == "columns":
            return _Section(self._file, dtype)
        file = TemporaryFile(dir=self._folder)  # noqa: SIM115
        return _Section(self._files.enter_context(file), dtype)

    def _labels(self, labels: Array | None) -> dict[str, Array]:
        """Return the array that is stored for labels, if there are any, by its name."""
        if labels is None:
            return {}
        if labels.dtype.kind in "biuf":
            return {"labels": labels}
        if labels.dtype.kind != "U":
            raise InputError(f"labels must be numbers or strings, got {labels.dtype}")
        texts, places = np.unique(labels, return_inverse=True)
        codes = [self._classes.setdefault(str(text), len(self._classes)) for text in texts]
        return {"codes": np.array(codes, np.int32)[places]}

    def close(self) -> None:
        """Complete the cache and give it its name."""
        with self._files:
            if not self._arrays:
                self.append(join([], 0, None))
            header = {
                "byteorder": sys.byteorder,
                "dimensions": self._dimensions,
                "fingerprint": self._fingerprint,
                "classes": list(self._classes),
                "arrays": {name: self._place(array) for name, array in self._arrays.items()},
            }
            text, place = json.dumps(header).encode(), self._file.tell()
            self._file.write(text)
            self._file.seek(0)
            self._file.write(START.pack(MAGIC, VERSION, zlib.crc32(text), place, len(text)))
            self._file.flush()

    def _place(self, array: _Section) -> dict[str, object]:
        """Move an array to the end of the cache, and return what the header says about it."""
        place = ALIGNMENT
        if array.file is not self._file:
            place = self._file.tell()
            array.file.seek(0)
            shutil.copyfileobj(array.file, self._file, 1 << 20)
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        told = {"dtype": array.dtype.str, "length": array.length}
        return {**told, "place": place, "crc32": array.crc32}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._files.__exit__(kind, *error)


def _dtypes(arrays: Mapping[str, Array | _Section]) -> str:
    return ", ".join(f"{name} of {array.dtype}" for name, array in arrays.items())
