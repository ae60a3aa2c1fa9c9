"""A web server with the control routes of an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any


@contextmanager
def serving(answer: Callable[[str, Any], tuple[int, Any] | None]) -> Iterator[str]:
    """Yield the URL of a server that calls ``answer(route, body)``; what that raises is a 500.

    It may return a status and a body.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                status, said = answer(self.path, json.loads(body) if body else None) or (200, {})
                told = json.dumps(said).encode()
            except Exception as error:
                told, status = str(error).encode(), 500
            self.send_response(status)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
