"""An HTTP server of a folder's files, each answered in one write.

    python -m benchmarks.server PORT FOLDER

Python's own ``http.server`` writes a header and its file apart. The kernel then holds the file back
until the header is acknowledged, which Linux delays by 40 ms (Nagle's algorithm).
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(SimpleHTTPRequestHandler):
    """Keeps connections open, and sends a header with its file at once."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def serving(folder: Path | str, port: int = 0, host: str = "") -> ThreadingHTTPServer:
    """Return a server that accepts requests, on a thread; ``shutdown`` ends it."""
    server = ThreadingHTTPServer((host, port), partial(Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    at, files = sys.argv[1:]
    print(f"serving {files} on port {serving(files, int(at)).server_port}", flush=True)
    threading.Event().wait()  # until killed
