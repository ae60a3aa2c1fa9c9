"""vLLM: a server takes versions from a store, and patches what has changed into its model.

The server's side is the weight transfer engine ``sparcel``, which vLLM finds by itself once sparcel
is installed beside it. The trainer's side is a `sparcel.delta.Publisher` and, for each server, a
`Server`. It needs no vLLM.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from http.client import HTTPException, IncompleteRead
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from sparcel.errors import CommunicationError, public_url, shown

if TYPE_CHECKING:
    from sparcel.delta import Version

__all__ = ["Server", "register"]


def register() -> None:
    """Make the engine known to vLLM, whose processes call this as an entry point.

    vLLM imports the engine only where a server asks for it. A vLLM that has no weight transfer
    serves as it does without sparcel.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    with suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(
            "sparcel", "sparcel.integrations.vllm.engine", "Engine"
        )


_MOST_TOLD = 1 << 16
"""How many bytes are read of what a server says of an error."""


class Server:
    """The control routes of a vLLM server, for the trainer.

    The server runs with ``--weight-transfer-config '{"backend": "sparcel"}'``, and with
    ``VLLM_SERVER_DEV_MODE=1``, without which vLLM has no such routes. Weights do not pass here: the
    server reads them from the store.

    Parameters
    ----------
    url
        Such as ``http://host:8000``.
    timeout
        Seconds that an answer may take. The first version is a whole model.
    """

    def __init__(self, url: str, timeout: float = 1800) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout

    def connect(self, store: str | os.PathLike[str]) -> None:
        """Tell the server where versions are, by a path or URL that is valid there.

        Each start of a server needs this once.
        """
        self._post("init_weight_transfer_engine", {"init_info": {"store": os.fspath(store)}})

    def serve(self, version: Version) -> None:
        """Let the server go to a version; requests in flight wait meanwhile, and then go on.

        Raises
        ------
        CommunicationError
            If the server cannot be reached, or does not get there. It may be paused then, as its
            weights may be no version. Serve again, or a later version: it goes there whatever its
            weights are.
        """
        self._post("pause?mode=keep")
        try:
            self._post("start_weight_update")
        except CommunicationError:  # maybe an update that failed has not ended in all workers
            with suppress(CommunicationError):
                self._post("finish_weight_update")
            self._post("start_weight_update")
        self._post("update_weights", {"update_info": {"version": version.number}})
        self._post("finish_weight_update", {"weight_version": str(version.number)})
        self._post("resume")

    def _post(self, route: str, body: object = None) -> None:
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
