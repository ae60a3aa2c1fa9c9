"""Writing the caches that `sparcel.rows.cache` maps."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

import numpy as np

from sparcel._files import replacing
from sparcel.errors import InputError
from sparcel.rows.cache import ALIGNMENT, CHECKED_BYTES, MAGIC, START, VERSION
from sparcel.rows.rows import Array, Rows, join


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
