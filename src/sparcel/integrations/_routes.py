"""The control routes of an engine's server."""

from __future__ import annotations

import json
from http.client import HTTPException, IncompleteRead
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from sparcel.errors import CommunicationError, public_url, shown

_MOST_TOLD = 1 << 16
"""How many bytes are read of what a server says of an error."""


class Routes:
    """Posts to a server.

    Parameters
    ----------
    url
        Such as ``http://host:8000``.
    timeout
        Seconds that an answer may take.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout

    def post(self, route: str, body: object = None) -> None:
        """Post to a route, or raise CommunicationError."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = Request(f"{self._url}/{route}", data, headers, method="POST")
        shown_url = f"{public_url(self._url)}/{route}"
        try:
            with urlopen(request, timeout=self._timeout):
                pass
        except HTTPError as error:
            told = shown(_told(error))
            raise CommunicationError(f"{shown_url}: {error.code} {told}") from error
        except (OSError, HTTPException) as error:
            raise CommunicationError(f"{shown_url}: {shown(repr(error))}") from error


def _told(error: HTTPError) -> str:
    """Return what a server says of an error, as far as it arrives."""
    try:
        with error:
            return error.read(_MOST_TOLD).decode(errors="replace")
    except IncompleteRead as cut:
        return cut.partial.decode(errors="replace")
    except (OSError, HTTPException) as lost:
        return f"{error.reason} ({lost!r})"
