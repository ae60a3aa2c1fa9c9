"""Where versions are kept: a store holds files, each of which is there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Protocol, runtime_checkable

from sparcel.core._files import create, locked, open_regular, read_whole, real, replacing
from sparcel.core._files import mapped as mapped_file
from sparcel.errors import FormatError, InputError

_LOCK = ".lock"
"""A file that publishers lock; it holds nothing."""

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""What the kernel says of file systems without hard links."""


@runtime_checkable
class Store(Protocol):
    """What a publisher and its subscribers need of a place for files."""

    def read(self, name: str) -> memoryview:
        """Return a file's bytes, in memory of their own, or raise FileNotFoundError or OSError."""

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file, whole or not at all, and return its length when it is durable."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def names(self) -> list[str]:
        """Return the names of all files, or raise InputError where they cannot be listed."""

    def alone(self) -> AbstractContextManager[object]:
        """Let one publisher at a time read and write the index, where that is possible."""


@runtime_checkable
class ExclusiveStore(Store, Protocol):
    """A store in which the first of several writers of a file wins, as a bucket of islands must."""

    def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
        """Write a file, whole or not at all, unless it is there; return whether it was written.

        Of several writers at the same time one writes. Raises InputError where that cannot be had.
        """


@runtime_checkable
class DoubtedStore(Store, Protocol):
    """A store that may be far, and in other hands: it ends what has no end, and tells typos.

    Several threads may read from it at the same time.
    """

    def read_at_most(self, name: str, most: int) -> memoryview:
        """Do as `read`, and raise FormatError as soon as a file is longer than ``most`` bytes."""

    def check_found(self) -> None:
        """Raise InputError if nothing can ever appear here, as in a bucket that does not exist."""


def store_at(place: Store | str | os.PathLike[str]) -> Store:
    """Return the store at a path, or at a URL that fsspec knows, such as ``s3://bucket/folder``.

    A store is returned as it is.

    Raises
    ------
    InputError
        If it is none of these.
    """
    if isinstance(place, str) and "://" in place:
        from sparcel.products.stores.remote import Remote

        return Remote(place)
    if isinstance(place, str | os.PathLike):
        return Folder(Path(place))
    if not isinstance(place, Store):
        raise InputError(f"a store is a path, a URL or a Store, got {type(place).__name__}")
    return place


def read_at_most(store: Store, name: str, most: int) -> memoryview:
    """Return a file's bytes, or raise FormatError if these are more than ``most``."""
    if isinstance(store, DoubtedStore):
        return store.read_at_most(name, most)
    data = store.read(name)
    check_length(name, len(data), most)
    return data


def mapped(store: Store, name: str) -> memoryview:
    """Return the bytes of a file that does not change, mapped where the store can do that."""
    take: Callable[[str], memoryview] = getattr(store, "mapped", store.read)
    return take(name)


def ranged(store: Store, name: str, most: int) -> Ranged | memoryview:
    """Return a file of which only some bytes are read, where the store can do that.

    Raises FormatError if it has more than ``most`` bytes.
    """
    take: Callable[[str, int], Ranged | memoryview] | None = getattr(store, "ranged", None)
    return read_at_most(store, name, most) if take is None else take(name, most)


def check_length(name: str, length: int, most: int | None) -> None:
    """Raise FormatError if a file has more than ``most`` bytes."""
    if most is not None and length > most:
        raise FormatError(f"{name} is longer than the {most} bytes that it may have")


class Ranged:
    """A file of which only those bytes are read that are asked for, by a slice.

    Several threads may do so at the same time.

    Parameters
    ----------
    size
        Its length.
    read
        Returns the bytes from one to before another one.

    Attributes
    ----------
    bytes
        How many were read.
    """

    _HEAD = 1 << 16
    """Bytes at the beginning that are read at once, because whoever reads a file begins there."""

    def __init__(self, size: int, read: Callable[[int, int], memoryview]) -> None:
        self._size, self._read = size, read
        self._head = read(0, min(size, self._HEAD)) if size else memoryview(b"")
        self.bytes, self._counting = len(self._head), Lock()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        begin, end, _ = part.indices(self._size)
        known = self._head[begin:end]
        first = begin + len(known)
        if first >= end:
            return known
        with self._counting:
            self.bytes += end - first
        rest = self._read(first, end)
        return memoryview(bytearray().join([known, rest])) if known else rest


class Folder:
    """Files in a folder, which is made if it is not there.

    A file is written under another name, and renamed. The folder may be a link. A link in it is
    none of its files, and neither is a pipe or a device: whoever reads or replaces one gets a
    FormatError.

    Attributes
    ----------
    lasting
        Whether what is written outlives a crash of the machine: it is flushed to disk.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.lasting = Path(path), True

    def read(self, name: str) -> memoryview:
        """Return a file's bytes."""
        return read_whole(self.path / name, links=False)

    def read_at_most(self, name: str, most: int) -> memoryview:
        """Return a file's bytes, or raise FormatError if these are more than ``most``."""
        return read_whole(self.path / name, links=False, most=most)

    def check_found(self) -> None:
        """Raise InputError if the folder around this one is not there; publishers would make it."""
        if not self.path.absolute().parent.exists():
            raise InputError(
                f"{self.path} is in no folder that exists; is it written as it should be, and"
                " mounted here?"
            )

    def mapped(self, name: str) -> memoryview:
        """Return a file's bytes where they are; the file must not change meanwhile."""
        return mapped_file(self.path / name, links=False)

    def ranged(self, name: str, most: int) -> Ranged:
        """Return a file of which only those bytes are read that are asked for.

        Raises FormatError if it has more than ``most`` bytes.
        """
        path = self.path / name
        with open_regular(path, links=False, most=most) as file:
            size = os.fstat(file.fileno()).st_size
        return Ranged(size, partial(_read_range, path))

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file, whole or not at all, and return its length."""
        self._make()
        with replacing(self.path / name, links=False, lasting=self.lasting) as file:
            file.writelines(parts)
            length = file.tell()
        if self.lasting:
            _flush(self.path)
        return length

    def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
        """Write a file, whole or not at all, unless it is there; return whether it was written."""
        self._make()
        own = self.path / f"{name}.{secrets.token_hex(8)}.part"
        try:
            with create(own) as file:
                file.writelines(parts)
                file.flush()
                if self.lasting:
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
        if self.lasting:
            _flush(self.path)
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the names of all files."""
        there = os.scandir(self.path) if self.path.is_dir() else ()
        return sorted(
            one.name for one in there if one.name != _LOCK and one.is_file(follow_symlinks=False)
        )

    def alone(self, *, wait: bool = True) -> AbstractContextManager[None]:
        """Let one publisher at a time read and write the index.

        That is so where the file system has locks; elsewhere nothing keeps two of them apart. Only
        those who may write to the folder can hold the lock.

        Raises
        ------
        InputError
            If the lock does not come within a minute, or its file is somebody else's.
        BlockingIOError
            If somebody else holds it, and this is not to wait.
        """
        self._make()
        return locked(self.path / _LOCK, wait=wait)

    def _make(self) -> None:
        folder = real(self.path)
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            _flush(path.parent)

    def __str__(self) -> str:
        return str(self.path)


def _read_range(path: Path, begin: int, end: int) -> memoryview:
    data = bytearray(end - begin)
    with open_regular(path, links=False) as file:
        file.seek(begin)
        if file.readinto(data) != len(data):
            raise FormatError(f"{path.name} has become shorter than {end} bytes")
    return memoryview(data)


def _flush(folder: Path) -> None:
    """Make the names in a folder durable."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
