"""vLLM: a server takes versions from a store, and patches what has changed into its model.

The server's side is the weight transfer engine ``sparcel``, which vLLM finds by itself once sparcel
is installed beside it. The trainer's side is a `sparcel.delta.Publisher` and, for each server, a
`Server`. It needs no vLLM.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from sparcel.errors import CommunicationError
from sparcel.integrations._deltas import Routes

if TYPE_CHECKING:
    from sparcel.products.delta import Version

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
        self._routes = Routes(url, timeout)

    def connect(
        self, store: str | os.PathLike[str], mirror: str | os.PathLike[str] | None = None
    ) -> None:
        """Tell the server where versions are; each start of a server needs this once.

        Parameters
        ----------
        store
            A path or URL that is valid there.
        mirror
            A folder on each host of the server, such as ``/dev/shm/run``, in which its workers keep
            one copy of the checkpoint together, and those of other servers, if each version is
            served to all of them before the next one. Without it, each worker keeps a copy.
        """
        told = {"store": os.fspath(store)}
        if mirror is not None:
            told["mirror"] = os.fspath(mirror)
        self._routes.post("init_weight_transfer_engine", {"init_info": told})

    def serve(self, version: Version) -> None:
        """Let the server go to a version; requests in flight wait meanwhile, and then go on.

        Raises
        ------
        CommunicationError
            If the server cannot be reached, or does not get there. It may be paused then, as its
            weights may be no version. Serve again, or a later version: it goes there whatever its
            weights are.
        """
        self._routes.post("pause?mode=keep")
        try:
            self._routes.post("start_weight_update")
        except CommunicationError:  # maybe an update that failed has not ended in all workers
            with suppress(CommunicationError):
                self._routes.post("finish_weight_update")
            self._routes.post("start_weight_update")
        self._routes.post("update_weights", {"update_info": {"version": version.number}})
        self._routes.post("finish_weight_update", {"weight_version": str(version.number)})
        self._routes.post("resume")
