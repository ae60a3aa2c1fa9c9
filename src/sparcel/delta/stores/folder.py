"""A folder on a file system whose renames are atomic."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from sparcel._files import replacing


def read_whole(path: Path) -> memoryview:
    """Return a file's bytes in memory of their own, whatever happens to the file."""
    with path.open("rb") as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        length = file.readinto(data)
    return memoryview(data)[:length]


class Folder:
    """Files in a folder, which is made if it is not there.

    A file is written under another name, flushed to disk and renamed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self, name: str) -> memoryview:
        """Return a file's bytes."""
        return read_whole(self.path / name)

    def mapped(self, name: str) -> memoryview:
        """Return a file's bytes where they are; the file must not change meanwhile."""
        with (self.path / name).open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")  # which cannot be mapped
            return memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE))

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file, whole or not at all, and return its length."""
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(self.path / name) as file:
            for part in parts:
                file.write(part)
            length = file.tell()
        # The new name is durable once its folder is.
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return length

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the names of all files."""
        return sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []

    def __str__(self) -> str:
        return str(self.path)
