"""The place that ``sparcel meet`` serves: files of a folder, over HTTP."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, NoReturn
from urllib.parse import quote

from sparcel.errors import CommunicationError
from sparcel.products.stores import Folder

PORT = 29400
"""Where ``sparcel meet`` listens unless it is told."""

_NAME = re.compile(r"[\w=!%.-]{1,250}")
_MOST_BYTES = 1 << 24
"""No key has more: the longest are the names of a model's tensors."""

_IDLE_SECONDS = 60.0
"""After so long without a request a connection is closed."""

_FIRST = "*"
"""What a request says that creates a file, in ``If-None-Match``, as object stores have it."""


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for ``/RUN/NAME``, each of which is a file."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        """Send a file, or the names of all of a run."""
        run, name = self._asked()
        try:
            self._answer(200, run.read(name) if name else "\n".join(run.names()).encode())
        except FileNotFoundError:
            self._answer(404)

    def do_PUT(self) -> None:
        """Write a file, or create it."""
        run, name = self._asked()
        length = int(self.headers.get("Content-Length", -1))
        if not name or not 0 <= length <= _MOST_BYTES:
            self._refuse()
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the connection has ended in a request")
        if self.headers.get("If-None-Match") == _FIRST:
            self._answer(201 if run.create(name, [body]) else 412)
        else:
            run.lasting = False  # it decides nothing
            run.write(name, [body])
            self._answer(204)

    def do_DELETE(self) -> None:
        """Remove a file."""
        run, name = self._asked()
        run.remove(name)
        self._answer(204)

    def _asked(self) -> tuple[Folder, str]:
        """Return the folder of a run, and the name of a file, which is empty for all."""
        run, _, name = self.path.removeprefix("/").partition("/")
        if not _NAME.fullmatch(run) or (name and not _NAME.fullmatch(name)):
            self._refuse()
        return Folder(self.server.folder / f"run-{run}"), name

    def _refuse(self) -> NoReturn:
        """End the connection of whoever sends what no island sends."""
        self._answer(400)
        raise ConnectionError("a request that no island makes")

    def _answer(self, status: int, body: bytes | memoryview = b"") -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """Serves the place ``tcp://HOST:port`` until it is closed.

    What islands have written is in a folder, from which another server goes on.

    Parameters
    ----------
    port
        Where to listen; 0 is any.
    folder
        Where the files are; None: a folder of the port in the user's cache, which is empty at first
        if the port is any.

    Raises
    ------
    CommunicationError
        When the port is taken.
    """

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, port: int, folder: Path | None = None) -> None:
        self._open = set[Any]()
        try:
            super().__init__(("", port), _Handler)
        except OSError as error:
            raise CommunicationError(f"port {port} cannot be served: {error}") from error
        self.port: int = self.server_address[1]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = folder or cache / "sparcel" / f"meet-{self.port}"
        if not port and folder is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_bind(self) -> None:
        """Bind, without a look at the name of this machine, which may take long."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection's requests on a thread of its own."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Tell nothing: whoever sent what is no request, or went away, knows it."""

    def close(self) -> None:
        """Serve no more."""
        self.shutdown()
        self.server_close()
        for connection in [*self._open]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Meeting:
    """A run's files at a place that a `Server` serves: an `ExclusiveStore`.

    Parameters
    ----------
    host, port
        Where the server is.
    run
        The name of the run.
    seconds
        How long a request may take.
    """

    def __init__(self, host: str, port: int, run: str, seconds: float) -> None:
        self._host, self._port, self._seconds = host, port, seconds
        self._run = quote(run, safe="")
        self._own = threading.local()

    def read(self, name: str) -> memoryview:
        """Return a file's bytes."""
        status, body = self._ask("GET", name)
        if status == 404:
            raise FileNotFoundError(name)
        return memoryview(body)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file."""
        body = b"".join(parts)
        self._ask("PUT", name, body)
        return len(body)

    def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
        """Write a file unless it is there; return whether it was written."""
        return self._ask("PUT", name, b"".join(parts), {"If-None-Match": _FIRST})[0] == 201

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._ask("DELETE", name)

    def names(self) -> list[str]:
        """Return the names of all files."""
        return self._ask("GET", "")[1].decode().splitlines()

    def alone(self) -> AbstractContextManager[None]:
        """Do nothing: nobody publishes here."""
        return nullcontext()

    def _ask(
        self, method: str, name: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return the answer's status and bytes; each thread has a connection of its own."""
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        self._own.connection = None  # it is kept if it is whole
        try:
            connection.request(method, f"/{self._run}/{name}", body, headers or {})
            answer = connection.getresponse()
            found = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConnectionError(f"{self}: {error!r}") from error
        if found[0] not in (200, 201, 204, 404, 412):
            connection.close()
            raise OSError(f"{self} answers {found[0]}")
        self._own.connection = connection
        return found

    def __str__(self) -> str:
        return f"tcp://{self._host}:{self._port}/{self._run}"
