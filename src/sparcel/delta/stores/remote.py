"""Any file system that fsspec knows: object stores, hubs, and static web servers to read from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sparcel.delta.stores.folder import read_whole
from sparcel.errors import InputError, MissingDependencyError, optional

_SECONDS = 60.0
"""How long a web server may be silent."""


class Remote:
    """Files below a URL such as ``s3://bucket/folder`` or ``https://host/folder``.

    A file appears when it is closed, as the objects of object stores do; on a file system where it
    does not, use a `Folder`. Subscribers can read from a web server; publishers cannot write there.
    """

    def __init__(self, url: str) -> None:
        with optional(f"a store at {url}", "delta"):
            import fsspec
        self._url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self._url, **self._options())
        except ImportError as error:
            raise MissingDependencyError(f"a store at {url} needs a package: {error}") from error
        except ValueError as error:
            raise InputError(f"{url} is no store: {error}") from error

    def read(self, name: str) -> memoryview:
        """Return a file's bytes."""
        with tempfile.NamedTemporaryFile() as copy:
            try:
                self._files.get_file(self._at(name), copy.name)
            except OSError:
                raise
            except Exception as error:  # of aiohttp, for one
                raise OSError(f"{name} cannot be read from {self._url}: {error!r}") from error
            return read_whole(Path(copy.name))

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file, whole or not at all, and return its length."""
        length = 0
        try:
            with self._files.transaction, self._files.open(self._at(name), "wb") as file:
                for part in parts:
                    length += file.write(part)
        except NotImplementedError as error:
            raise InputError(f"{self._url} cannot be written to") from error
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

    def _options(self) -> dict[str, object]:
        """Return options for fsspec: a large file may take longer than aiohttp's five minutes."""
        if not self._url.startswith(("http://", "https://")):
            return {}
        import aiohttp

        waits = aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS, sock_read=_SECONDS)
        return {"client_kwargs": {"timeout": waits}}

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def __str__(self) -> str:
        return self._url
