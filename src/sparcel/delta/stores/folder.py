"""A folder on a file system whose renames are atomic."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sparcel._files import replacing
from sparcel.errors import FormatError, InputError

_LOCK = ".lock"
"""A file that publishers lock; it holds nothing."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""What the kernel says of file systems without hard links."""


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

    def read_at_most(self, name: str, most: int) -> memoryview:
        """Return a file's bytes, or raise FormatError if these are more than ``most``."""
        found = (self.path / name).stat().st_size
        if found > most:
            raise FormatError(f"{name} has {found} bytes, of which there may be {most}")
        return self.read(name)

    def check_found(self) -> None:
        """Raise InputError if the folder around this one is not there; publishers would make it."""
        if not self.path.absolute().parent.exists():
            raise InputError(
                f"{self.path} is in no folder that exists; is it written as it should be, and"
                " mounted here?"
            )

    def mapped(self, name: str) -> memoryview:
        """Return a file's bytes where they are; the file must not change meanwhile."""
        with (self.path / name).open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")  # which cannot be mapped
            return memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE))

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file, whole or not at all, and return its length."""
        self._make()
        with replacing(self.path / name) as file:
            for part in parts:
                file.write(part)
            length = file.tell()
        _flush(self.path)
        return length

    def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
        """Write a file, whole or not at all, unless it is there; return whether it was written."""
        self._make()
        own = self.path / f"{name}.{secrets.token_hex(8)}.part"
        try:
            with own.open("xb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.link(own, self.path / name)
        except FileExistsError:
            # NFS says so, too, of a link that was made and whose confirmation got lost.
            return own.stat().st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise InputError(
                f"{self.path} is on a file system without hard links, by which the first of"
                " several writers of a file wins; choose another one"
            ) from error
        finally:
            own.unlink(missing_ok=True)
        _flush(self.path)
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the names of all files."""
        there = os.scandir(self.path) if self.path.is_dir() else ()
        return sorted(one.name for one in there if one.name != _LOCK and one.is_file())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let one publisher at a time read and write the index.

        That is so where the file system has locks; elsewhere nothing keeps two of them apart.
        """
        self._make()
        lock = self.path / _LOCK
        with suppress(PermissionError):  # somebody else's file can be locked, but not touched
            lock.touch()
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                yield
                return
            try:
                yield
            finally:
                # Closing is not enough if a process was forked meanwhile, which has the file too.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _make(self) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            _flush(path.parent)

    def __str__(self) -> str:
        return str(self.path)


def _flush(folder: Path) -> None:
    """Make the names in a folder durable."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
