"""The HTTP server of `commlib.py`: the files of a folder, each answered in one write.

    python -m benchmarks.network.commlib_store PORT FOLDER

Python's own ``http.server`` writes a header and its file apart. The kernel then holds the file back
until the header is acknowledged, which Linux delays by 40 ms (Nagle's algorithm).
"""

from __future__ import annotations

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer


class Handler(SimpleHTTPRequestHandler):
    """Keeps connections open, and sends a header with its file at once."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def main() -> None:
    """Print a line once requests are accepted, and serve until killed."""
    port, folder = sys.argv[1:]
    server = ThreadingHTTPServer(("", int(port)), partial(Handler, directory=folder))
    print(f"serving {folder} on port {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
