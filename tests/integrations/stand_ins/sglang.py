"""Stand-ins for what `sparcel.integrations.sglang` uses, with the signatures of SGLang 0.5.23."""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks: dict[str, Callable[..., Any]] = {}  # noqa: RUF012

    @classmethod
    def register(
        cls,
        target: str,
        hook: Callable[..., Any],
        hook_type: HookType = HookType.AFTER,
        *,
        source: Any = None,
    ) -> None:
        assert hook_type is HookType.AROUND, "others are not stood in for"
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls._hooks.items():
            place, _, name = target.rpartition(".")
            holder = pkgutil.resolve_name(place)
            setattr(holder, name, _around(getattr(holder, name), hook))
        cls._hooks.clear()


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdater:
    tp_rank: int
    device: str
    gpu_id: int
    model_config: Any
    custom_weight_loaders: dict[str, Any]
    get_model: Callable[[], Any]
    update_model_fields: Callable[..., None]
    recapture_cuda_graph: Callable[[], None]
    get_model_runner: Callable[[], Any]
    _model_update_group: dict[str, Any] = field(default_factory=dict)

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str,
        weight_name_filter: Callable[[str], bool] | None = None,
        recapture_cuda_graph: bool = False,
    ) -> tuple[bool, str]:
        if load_format not in ("auto", "safetensors"):
            raise ValueError(f"{load_format!r} is not a valid LoadFormat")
        files = [*Path(model_path).glob("*.safetensors")] if Path(model_path).is_dir() else []
        if not files:
            return False, f"Failed to get weights iterator: no model weights with `{model_path}`."

        def load() -> None:
            for file in files:
                self.get_model().load_weights(load_file(file).items())

        try:
            load()
        except Exception as error:
            load()
            return False, f"Failed to update weights: {error}.\nRolling back to original weights."
        return True, "Succeeded to update model weights."


class TokenizerManager:
    model_path: str
    served_model_name: str
    load_format: str

    def _update_model_path_info(self, model_path: str, load_format: str) -> None:
        self.served_model_name, self.model_path = model_path, model_path
        self.load_format = load_format


class Group:
    """A tensor-parallel group of threads."""

    def __init__(self, size: int) -> None:
        self.meet = threading.Barrier(size, timeout=60)
        self.told: dict[int, Any] = {}

    def all_gather_object(self, obj: Any) -> list[Any]:
        self.told[_here.rank] = obj
        self.meet.wait()
        told = [self.told[rank] for rank in range(self.meet.parties)]
        self.meet.wait()
        return told


_here = threading.local()


def be(rank: int, group: Group, stages: int) -> None:
    """Let this thread be a worker's process."""
    _here.rank, _here.parallel = rank, SimpleNamespace(tp_group=group, pp_size=stages)


def get_parallel() -> Any:
    return _here.parallel


MODULES: dict[str, dict[str, Any]] = {
    "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    "sglang.srt.model_executor.model_runner_components.weight_updater": {
        "WeightUpdater": WeightUpdater
    },
    "sglang.srt.managers.tokenizer_manager": {"TokenizerManager": TokenizerManager},
    "sglang.srt.runtime_context": {"get_parallel": get_parallel},
}
