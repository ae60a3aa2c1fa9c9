"""SGLang: a server goes to versions of a store, and loads them from one copy a host.

The server's side is a plugin, which SGLang finds by itself once sparcel is installed beside it. The
trainer's side is a `sparcel.delta.Publisher` and, for each server, a `Server`. It needs no SGLang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from sparcel.errors import InputError, VersionError, public_url
from sparcel.integrations._deltas import Routes
from sparcel.products.delta import HostSubscriber, Version

__all__ = ["Server", "register"]

_OURS = "sparcel:"
"""How the path of a model begins that is a version of a store."""

Answer: TypeAlias = tuple[bool, str]
"""Whether an update succeeded, and a message."""


def register() -> None:
    """Put hooks into SGLang, whose processes call this as an entry point.

    Requests that are not from a `Server` go their way untouched.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in [
        (
            "sglang.srt.model_executor.model_runner_components.weight_updater"
            ".WeightUpdater.update_weights_from_disk",
            _Worker().update,
        ),
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._update_model_path_info",
            _keep_names,
        ),
    ]:
        HookRegistry.register(target, hook, HookType.AROUND)


class Server:
    """The control routes of an SGLang server, for the trainer.

    Weights do not pass here: the server reads them from the store.

    Parameters
    ----------
    url
        Such as ``http://host:30000``.
    timeout
        Seconds that an answer may take. The first version is a whole model.
    """

    def __init__(self, url: str, timeout: float = 1800) -> None:
        self._routes = Routes(url, timeout)
        self._places: dict[str, str] = {}

    def connect(self, store: str | os.PathLike[str], mirror: str | os.PathLike[str]) -> None:
        """Note where versions are; the server is told with each version.

        Parameters
        ----------
        store
            A path or URL that is valid on the server's hosts.
        mirror
            A folder on each host of the server, such as ``/dev/shm/run``, in which its workers keep
            one copy of the checkpoint together, and those of other servers, if each version is
            served to all of them before the next one.
        """
        self._places = {"store": os.fspath(store), "mirror": os.fspath(mirror)}

    def serve(self, version: Version) -> None:
        """Let the server go to a version.

        Requests in flight wait meanwhile, and go on with the new weights; what SGLang has cached
        of them is computed anew.

        Raises
        ------
        InputError
            If `connect` was not called.
        CommunicationError
            If the server cannot be reached, or does not get there. It may be paused then, as its
            weights may be no version. Serve again, or another version: each is loaded whole,
            whatever the weights are.
        """
        if not self._places:
            raise InputError("there is no store yet; call connect first")
        self._routes.post("pause_generation", {"mode": "retract"})
        self._routes.post(
            "update_weights_from_disk",
            {
                "model_path": path_of(version, **self._places),
                "load_format": "safetensors",
                "weight_version": str(version.number),
                "flush_cache": True,
            },
        )
        self._routes.post("continue_generation", {})


def path_of(version: Version, store: str, mirror: str) -> str:
    """Return what a request has as the path of a model, to tell the plugin a version of a store.

    SGLang without the plugin refuses such a path, and goes on; an unknown load format would end it.
    """
    told = {"store": store, "mirror": mirror, "version": version.stated()}
    return _OURS + quote(json.dumps(told), safe="")


class _Worker:
    """What a worker's process keeps: a reader of versions, and what it reads."""

    def __init__(self) -> None:
        self._host: HostSubscriber | None = None
        self._places = ("", "")

    def update(
        self,
        original: Callable[..., Answer],
        updater: Any,
        model_path: str,
        load_format: str,
        *args: Any,
        **settings: Any,
    ) -> Answer:
        """Go to a version and let SGLang load it, if ``model_path`` tells one.

        SGLang calls this for the model, and for each draft model, in all workers. The answer is
        that of all workers of a tensor-parallel group: SGLang asks the first one alone.
        """
        if not model_path.startswith(_OURS):
            return original(updater, model_path, load_format, *args, **settings)
        try:
            told = json.loads(unquote(model_path.removeprefix(_OURS)))
            version, store, place = Version.read(told["version"]), told["store"], told["mirror"]
        except (LookupError, TypeError, ValueError) as error:
            return False, f"{model_path} tells no version: {error!r}"

        def go_to() -> Answer:
            self._go_to(version, store, place)
            return True, ""

        def load() -> Answer:
            answer = original(updater, place, "safetensors", *args, **settings)
            if answer[0] and self._host is not None:
                self._host.check_at(version)
            return answer

        answer = _together(go_to)
        return _together(load) if answer[0] else answer

    def _go_to(self, version: Version, store: str, place: str) -> None:
        if self._host is None or self._places != (store, place):
            self._host, self._places = HostSubscriber(store, place), (store, place)
        found = self._host.go_to(version.number)
        if found != version:
            raise VersionError(
                f"{public_url(store)} has version {found}, and not {version}, which is of another"
                " store or run"
            )


def _together(step: Callable[[], Answer]) -> Answer:
    """Do a step in all workers of a tensor-parallel group; each gets what any has failed at."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.pp_size > 1:  # later stages begin when the first one has answered for all
        return False, "sparcel does not serve models in pipeline stages"
    try:
        answer = step()
    except Exception as error:
        answer = False, f"{type(error).__name__}: {error}"
    answers = parallel.tp_group.all_gather_object(answer)
    failed = sorted({message for ok, message in answers if not ok})
    return (False, "; ".join(failed)) if failed else answer


def _keep_names(
    original: Callable[..., None], manager: Any, model_path: str, load_format: str
) -> None:
    """Leave a server its names and its load format; SGLang takes them from each request."""
    if not model_path.startswith(_OURS):
        original(manager, model_path, load_format)
