"""Any file system that fsspec knows: object stores, hubs, and static web servers to read from."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from sparcel.delta.stores.folder import read_whole
from sparcel.errors import InputError, MissingDependencyError, SparcelError, optional

_SECONDS = 60.0
"""How long a web server may be silent."""

_IN_MEMORY = threading.Lock()
"""Orders whoever reads and writes ``memory://``, where a file has one position for all."""


class Remote:
    """Files below a URL such as ``s3://bucket/folder`` or ``https://host/folder``.

    A file appears when it is closed, as the objects of object stores do; on a file system where it
    does not, use a `Folder`. Subscribers can read from a web server; publishers cannot write there.
    Nothing keeps two publishers apart that write the index at the same moment: see to it that there
    is one.
    """

    def __init__(self, url: str) -> None:
        with optional(f"a store at {url}", "delta"):
            import fsspec
        self._url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(
                self._url, skip_instance_cache=True, **self._options()
            )
        except ImportError as error:
            raise MissingDependencyError(f"a store at {url} needs a package: {error}") from error
        except ValueError as error:
            raise InputError(f"{url} is no store: {error}") from error
        in_memory = self._files.protocol == "memory"
        # A transaction ends whatever any thread writes to the file system.
        self._writing = _IN_MEMORY if in_memory else threading.Lock()
        self._in_turn = _IN_MEMORY if in_memory else nullcontext()
        plain = fsspec.AbstractFileSystem.pipe_file  # asynchronous ones have another on the object
        self._can_create = getattr(self._files.pipe_file, "__func__", None) is not plain

    def read(self, name: str) -> memoryview:
        """Return a file's bytes, by way of a file in the folder for temporary ones."""
        with tempfile.NamedTemporaryFile() as copy:
            with self._telling(f"{name} cannot be read from"), self._in_turn:
                self._files.get_file(self._at(name), copy.name)
            return read_whole(Path(copy.name))

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file, whole or not at all, and return its length."""
        length = 0
        with (
            self._telling(f"{name} cannot be written to"),
            self._writing,
            self._files.transaction,
            self._files.open(self._at(name), "wb") as file,
        ):
            for part in parts:
                length += file.write(part)
        return length

    def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
        """Write a file, whole or not at all, unless it is there; return whether it was written.

        Raises
        ------
        InputError
            When the file system cannot tell which of several writers is the first.
        """
        if not self._can_create:  # fsspec would look whether the file is there, and then write it
            raise InputError(
                f"{self._url} cannot tell which of several writers of a file is the first; use"
                " an object store that can, or a folder by its path"
            )
        try:
            with (
                self._telling(f"{name} cannot be created in"),
                self._in_turn,
            ):
                self._files.pipe_file(self._at(name), b"".join(parts), mode="create")
        except OSError as error:
            # Not every store says that the file is there, or tells it from another writer's haste.
            if isinstance(error, FileExistsError) or name in self.names():
                return False
            raise
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError), self._telling(f"{name} cannot be removed from"):
            self._files.rm_file(self._at(name))

    def names(self) -> list[str]:
        """Return the names of all files, or raise InputError where they cannot be listed."""
        self._files.invalidate_cache()
        try:
            with self._telling("files cannot be listed of"):
                found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        files = [one["name"] for one in found if one["type"] == "file"]
        return sorted(path.rsplit("/", 1)[-1] for path in files)

    def alone(self) -> AbstractContextManager[None]:
        """Do nothing: places like these have no locks in common."""
        return nullcontext()

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Turn errors into InputError where the place cannot do that, else into OSError."""
        try:
            yield
        except (OSError, SparcelError):
            raise
        except NotImplementedError as error:
            raise InputError(
                f"{what} {self._url}: its file system does not do that; publish to a folder that a"
                " web server serves, or to an object store"
            ) from error
        except Exception as error:  # of aiohttp, for one
            raise OSError(f"{what} {self._url}: {error!r}") from error

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
