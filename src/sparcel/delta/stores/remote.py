"""Any file system that fsspec knows: object stores, hubs, and static web servers to read from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sparcel.delta.stores.folder import read_whole
from sparcel.errors import InputError, optional


class Remote:
    """Files below a URL such as ``s3://bucket/folder`` or ``https://host/folder``.

    A file appears when it is closed, as the objects of object stores do; on a file system where it
    does not, use a `Folder`. Subscribers can read from a web server; publishers cannot write there.
    """

    def __init__(self, url: str) -> None:
        with optional(f"a store at {url}", "delta"):
            import fsspec
        self._url = url.rstrip("/")
        self._files, self._root = fsspec.core.url_to_fs(self._url)

    def read(self, name: str) -> memoryview:
        """Return a file's bytes."""
        with tempfile.NamedTemporaryFile() as copy:
            self._files.get_file(self._at(name), copy.name)
            return read_whole(Path(copy.name))

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file, whole or not at all, and return its length."""
        length = 0
        with self._files.transaction, self._files.open(self._at(name), "wb") as file:
            for part in parts:
                length += file.write(part)
        return length

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))

    def names(self) -> list[str]:
        """Return the names of all files, or raise InputError where they cannot be listed."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except NotImplementedError as error:
            raise InputError(f"the files of {self._url} cannot be listed") from error
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def __str__(self) -> str:
        return self._url
