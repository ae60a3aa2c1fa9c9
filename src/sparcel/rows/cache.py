"""Rows in a file that is mapped into memory, so that each rank reads only what it uses.

The file consists of

- the magic, the version, the header's checksum, where the header begins and how long it is:
  integers of 4, 4, 8 and 8 bytes, little-endian;
- arrays, each at a multiple of 64 bytes, in the byte order of the machine: columns, values,
  offsets, and labels, or for labels that are texts their codes: places in a list of classes;
- the header, in JSON, which comes last because lengths are known last. It has the byte order,
  dimensions, fingerprint, classes, and dtype, length, place and checksum of each array.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import zlib
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from sparcel._checks import whole_number
from sparcel.errors import InputError
from sparcel.rows.pieces import Paths, files_of
from sparcel.rows.rows import Array, Rows

MAGIC, VERSION = b"\x93SPARCEL", 1
START = struct.Struct("<8sIIQQ")
ALIGNMENT = 64


def fingerprint(paths: Paths, **settings: object) -> str:
    """Describe what a cache is made of: files by name, size and time of change, and settings.

    Parameters
    ----------
    paths
        The sources; their folders do not count, so all may move together.
    **settings
        What else the rows depend on, of types that JSON knows.
    """
    stats = [(path.name, path.stat()) for path in files_of(paths)]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return json.dumps({"files": files, "settings": settings}, sort_keys=True)


def holds(path: str | os.PathLike[str], fingerprint: str) -> bool:
    """Tell whether `load` finds rows that are made of this."""
    found = _open(Path(path))
    return found is not None and found[0]["fingerprint"] == fingerprint


def load(
    path: str | os.PathLike[str], fingerprint: str | None = None, rank: int = 0, ranks: int = 1
) -> Rows | None:
    """Map a cache into memory, or a rank's share of it.

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
        When the file is broken, as far as its header tells; `verify` looks at everything.
    """
    found = _open(Path(path))
    if found is None or fingerprint not in (None, found[0]["fingerprint"]):
        return None
    return _rows(Path(path), *found, rank, ranks)


def mapped(file: IO[bytes]) -> Rows:
    """Map what a `CacheWriter` wrote to an open file, which may be closed then."""
    path = Path(str(file.name))
    found = _content(path, file)
    assert found is not None, "written by this process"
    return _rows(path, *found, 0, 1)


def verify(path: str | os.PathLike[str]) -> None:
    """Read a cache completely, and raise an `InputError` if a checksum is wrong."""
    found = _open(Path(path))
    if found is None:
        raise InputError(f"{path} is no cache that this version on this machine can read")
    header, content = found
    for name in header["arrays"]:
        _check(Path(path), content, header, name)


def shard(rows: Rows, rank: int, ranks: int) -> Rows:
    """Return one of ``ranks`` runs of consecutive rows, as views, balanced by their entries.

    A row counts as one more than its entries. Of the offsets only few are read to find the runs.
    """
    whole_number(ranks, "ranks", at_least=1)
    whole_number(rank, "rank", at_least=0, at_most=ranks - 1)
    total = rows.nnz + len(rows)

    def first(part: int) -> int:
        places = range(len(rows) + 1)
        return bisect_left(places, total * part, key=lambda i: (int(rows.offsets[i]) + i) * ranks)

    return rows.slice(first(rank), first(rank + 1))


def _open(path: Path) -> tuple[dict[str, Any], mmap.mmap] | None:
    """Read the header and map the file, unless there is none for this version and machine."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from error
    with file:
        return _content(path, file)


def _content(path: Path, file: IO[bytes]) -> tuple[dict[str, Any], mmap.mmap] | None:
    file.seek(0)
    start = file.read(START.size)
    if len(start) < START.size or not start.startswith(MAGIC):
        raise InputError(f"{path} is no cache of rows; give the cache another path")
    _, version, crc32, place, length = START.unpack(start)
    if version != VERSION:
        return None
    if place + length != os.fstat(file.fileno()).st_size:
        raise _broken(path, "its length is not what it says")
    file.seek(place)
    text = file.read(length)
    if zlib.crc32(text) != crc32:
        raise _broken(path, "the checksum of its header is wrong")
    header = json.loads(text)
    if header["byteorder"] != sys.byteorder:
        return None
    return header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _rows(path: Path, header: dict[str, Any], content: mmap.mmap, rank: int, ranks: int) -> Rows:
    arrays = {name: _array(content, entry) for name, entry in header["arrays"].items()}
    labels = arrays.get("labels", arrays.get("codes"))
    dimensions = header["dimensions"]
    rows = Rows(arrays["offsets"], arrays["columns"], arrays["values"], dimensions, labels)
    rows = rows if ranks == 1 else shard(rows, rank, ranks)
    if "codes" not in arrays:
        return rows
    _check(path, content, header, "codes")
    return replace(rows, labels=np.array(header["classes"], np.str_)[rows.labels])


def _array(content: mmap.mmap, entry: dict[str, Any]) -> Array:
    return np.frombuffer(content, np.dtype(entry["dtype"]), entry["length"], entry["place"])


def _check(path: Path, content: mmap.mmap, header: dict[str, Any], name: str) -> None:
    entry = header["arrays"][name]
    if zlib.crc32(_array(content, entry).data) != entry["crc32"]:
        raise _broken(path, f"the checksum of its {name} is wrong")


def _broken(path: Path, why: str) -> InputError:
    return InputError(f"{path} is broken: {why}; remove it, so that it is made anew")
