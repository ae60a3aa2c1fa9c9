"""Any file system that fsspec knows: object stores, hubs, and static web servers to read from."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sparcel.core._files import mapped, read_whole
from sparcel.errors import (
    FormatError,
    InputError,
    MissingDependencyError,
    SparcelError,
    optional,
    public_url,
    shown,
)
from sparcel.products.stores import Ranged, check_length

_SECONDS = 60.0
"""How long a web server may be silent."""

_SLOWEST = 1000
"""Bytes a second: what comes more slowly, after a while, is taken for an answer without an end."""

_IN_MEMORY = threading.Lock()
"""Orders whoever reads and writes ``memory://``, where a file has one position for all."""

_WEB = ("http://", "https://")

_URL = re.compile(r"\w[\w+.-]*://[^\s'\"<>)]+")

_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "tos", "obs", "cos"}
"""Protocols whose paths begin with the name of a bucket, which no writer makes."""

_HARMLESS = 3
"""So short parts of a query tell nothing, and would be found in every error."""

_KINDS = (FileNotFoundError, FileExistsError, PermissionError, TimeoutError, ConnectionError)
"""Errors whose kind tells a caller something."""


class Remote:
    """Files below a URL such as ``s3://bucket/folder`` or ``https://host/folder``.

    A file appears when it is closed, as the objects of object stores do; on a file system where it
    does not, use a `Folder`. Subscribers can read from a web server; publishers cannot write there.
    Nothing keeps two publishers apart that write the index at the same moment: see to it that there
    is one. A query, as of a signed URL, goes with each request to a web server.

    Neither ``str`` nor any error shows user, password or query.
    """

    def __init__(self, url: str) -> None:
        self._url = public_url(url).rstrip("/")
        with optional(f"a store at {self._url}", "delta"):
            import fsspec
        place, mark, query = url.partition("#")[0].partition("?")
        self._is_web = place.startswith(_WEB)
        if mark and not self._is_web:
            raise InputError(
                f"{self._url} is given with a query, which only web servers take; give what it"
                " says in the settings of the file system"
            )
        self._query = mark + query
        self._secrets = _secrets(place, query)
        with self._telling("nothing answers at"):
            try:
                self._files, self._root = fsspec.core.url_to_fs(
                    place.rstrip("/"), skip_instance_cache=True, **self._options()
                )
            except ImportError as error:
                raise MissingDependencyError(
                    f"a store at {self._url} needs a package: {self._told(error)}"
                ) from self._cause(error)
            except ValueError as error:
                raise InputError(f"{self._url} is no store: {self._told(error)}") from self._cause(
                    error
                )
        protocols = self._files.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else {*protocols}
        in_memory = "memory" in self._protocols
        # A transaction ends whatever any thread writes to the file system.
        self._writing = _IN_MEMORY if in_memory else threading.Lock()
        self._in_turn: AbstractContextManager[object] = nullcontext()
        if not self._files.async_impl:
            self._in_turn = _IN_MEMORY if in_memory else threading.Lock()
        self._is_found = in_memory or self._is_web  # these do not tell
        plain = fsspec.AbstractFileSystem.pipe_file  # asynchronous ones have another on the object
        self._can_create = getattr(self._files.pipe_file, "__func__", None) is not plain

    def read(self, name: str) -> memoryview:
        """Return a file's bytes, by way of a file in the folder for temporary ones."""
        return self.read_at_most(name, None)

    def read_at_most(self, name: str, most: int | None) -> memoryview:
        """Return a file's bytes, and stop if there are more than ``most``, or they come too slowly.

        Raises
        ------
        FormatError
            If there are more.
        """
        with self._copied(name, most) as copy:
            data = read_whole(copy)
        check_length(name, len(data), most)
        return data

    def mapped(self, name: str) -> memoryview:
        """Return a file's bytes in a file without a name, in the folder for temporary ones."""
        with self._copied(name, None) as copy:
            return mapped(copy)

    def ranged(self, name: str, most: int) -> Ranged | memoryview:
        """Return a file of which only those bytes are read that are asked for.

        Of a web server it is read whole: many of them send all, whatever is asked for. Raises
        FormatError if it has more than ``most`` bytes.
        """
        if self._is_web:
            return self.read_at_most(name, most)
        with self._telling(f"{name} cannot be read from"), self._in_turn:
            size = int(self._files.size(self._at(name)) or 0)
        check_length(name, size, most)
        return Ranged(size, partial(self._read_range, name))

    def _read_range(self, name: str, begin: int, end: int) -> memoryview:
        with self._telling(f"{name} cannot be read from"), self._in_turn:
            data = bytearray(self._files.cat_file(self._at(name), start=begin, end=end))
        if len(data) != end - begin:
            raise FormatError(
                f"{name} sends {len(data)} bytes from {begin} to {end} instead of {end - begin}"
            )
        return memoryview(data)

    @contextmanager
    def _copied(self, name: str, most: int | None) -> Iterator[Path]:
        """Copy a file to the folder for temporary ones, until the block ends."""
        with tempfile.NamedTemporaryFile() as copy:
            with self._telling(f"{name} cannot be read from"), self._in_turn:
                # Others may copy without a word of how much has come, as ``file://`` does.
                if most is not None and not self._files.async_impl:
                    check_length(name, self._files.size(self._at(name)) or 0, most)
                self._files.get_file(self._at(name), copy.name, callback=_watching(name, most))
            yield Path(copy.name)

    def check_found(self) -> None:
        """Raise InputError if there is no place in which the folder could appear, as no bucket.

        Some places do not tell that, such as web servers; and what may not be looked at may exist.
        """
        bucket, above = self._root.partition("/")[0], self._root.rpartition("/")[0]
        parent, kind = (
            (above, "folder") if self._protocols.isdisjoint(_BUCKETS) else (bucket, "bucket")
        )
        if self._is_found or not parent:
            return
        try:
            with self._telling("files cannot be listed of"):
                self._files.ls(parent, detail=False)
        except FileNotFoundError:
            raise InputError(
                f"there is no {kind} {shown(parent)}, so nothing can be published to {self._url};"
                " is it written as it should be?"
            ) from None
        except (OSError, InputError):
            return
        self._is_found = True

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
            with self._telling(f"{name} cannot be created in"), self._in_turn:
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
        except SparcelError:
            raise
        except NotImplementedError as error:
            raise InputError(
                f"{what} {self._url}: its file system does not do that; publish to a folder that a"
                " web server serves, or to an object store"
            ) from self._cause(error)
        except Exception as error:  # of aiohttp, for one
            kind = next((one for one in _KINDS if isinstance(error, one)), OSError)
            raise kind(f"{what} {self._url}: {self._told(error)}") from self._cause(error)

    def _told(self, error: Exception) -> str:
        """Return what another library's error says, without what is secret in the URL."""
        ours = isinstance(error, ImportError | ValueError)  # fsspec's, which say it all
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "…")
        # A server may have led to another one, by a URL that is secret, too.
        return shown(_URL.sub(lambda url: public_url(url[0]), text))

    def _cause(self, error: Exception) -> Exception | None:
        """Return the error, unless its traceback could show what is secret."""
        return None if self._secrets or self._is_web else error

    def _options(self) -> dict[str, object]:
        """Return options for fsspec: a large file may take longer than aiohttp's five minutes.

        Files come as they are, because few bytes that are packed can become very many.
        """
        if not self._is_web:
            return {}
        import aiohttp

        client = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS, sock_read=_SECONDS),
            "headers": {"Accept-Encoding": "identity"},
            "auto_decompress": False,
        }
        # A signature may be one of the bytes that it is written with.
        return {"client_kwargs": client, "encoded": bool(self._query)}

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}{self._query}"

    def __str__(self) -> str:
        return self._url


def _secrets(place: str, query: str) -> list[str]:
    """Return what must not be told of a URL, the longest first, also as libraries decode it."""
    login = place.partition("://")[2].removesuffix(public_url(place).partition("://")[2])
    # Libraries tell parts, too, such as what they take for the name of a bucket.
    found = [login, login.rstrip("@"), login.rstrip("@").partition(":")[2], query]
    found += [*re.split("[/:@]", login), *re.split("[&=]", query)]
    several = {*found, *map(unquote, found)}
    return sorted((one for one in several if len(one) > _HARMLESS), key=len, reverse=True)


def _watching(name: str, most: int | None) -> Any:
    """Return what fsspec tells of the bytes that come, which ends a read that has no end."""
    from fsspec.callbacks import Callback

    begin = time.monotonic()

    class Watch(Callback):  # type: ignore[misc]
        read = 0

        def relative_update(self, inc: int = 1) -> None:
            self.read += inc
            check_length(name, self.read, most)
            if time.monotonic() - begin > _SECONDS + self.read / _SLOWEST:
                raise OSError(
                    f"{self.read} bytes of {name} came in {time.monotonic() - begin:.0f} s"
                )

    return Watch()
