"""Where versions are kept: a store holds files, each of which is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from sparcel.errors import FormatError, InputError
from sparcel.products.stores.folder import Folder as Folder
from sparcel.products.stores.folder import Ranged as Ranged


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
