"""Stand-ins for what `sparcel.integrations.slime` uses of slime, Miles and Ray.

With the signatures of slime at 624b824a and of Miles at 31f1ca96, and of their engines' actors.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import torch.distributed as dist
from torch import Tensor, nn

from sparcel.products.delta import HostSubscriber, Version

Bucket = list[tuple[str, Tensor]]

group: list[dist.ProcessGroup] = []
"""What the frameworks keep as their group of all ranks, over Gloo."""


def get_gloo_group() -> dist.ProcessGroup:
    return group[-1]


class SlimeUpdater:
    """The model is one bucket: what this rank gathers, if anything."""

    def __init__(
        self,
        args: Namespace,
        model: Sequence[nn.Module],
        weights_getter: Callable[[], Mapping[str, Tensor]],
        *,
        model_name: str,
        quantization_config: dict[str, int | str | list[str]] | None,
    ) -> None:
        self.args, self.weights_getter = args, weights_getter
        self.weight_version = 0
        self.update_weight_metrics: dict[str, float] = {}

    def pop_metrics(self) -> dict[str, float]:
        out, self.update_weight_metrics = self.update_weight_metrics, {}
        return out

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, object]] | None = None,
    ) -> None:
        self.rollout_engines = rollout_engines

    def disconnect_rollout_engines(self) -> None: ...

    def update_weights(self) -> None: ...

    def _iter_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights_getter().items()
        dist.barrier(group=get_gloo_group())


class MilesUpdater:
    """As `SlimeUpdater`, in buckets of a tensor each."""

    def __init__(
        self,
        args: Namespace,
        model: Sequence[nn.Module],
        weights_getter: Callable[[], Mapping[str, Tensor]],
        *,
        model_name: str,
        quantization_config: dict[str, int | str | list[str]] | None,
        is_lora: bool = False,
    ) -> None:
        self.args, self.weights_getter = args, weights_getter
        self.weight_version = 0
        self.rollout_engines: Sequence[Any] | None = None

    def pop_metrics(self) -> dict[str, float]:
        out: dict[str, float] = self.__dict__.pop("update_weight_metrics", {})
        return out

    def is_rollout_engines_fresh(self) -> bool:
        return self.rollout_engines is not None

    def mark_engine_connection_stale(self) -> None: ...

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
    ) -> None:
        self.rollout_engines = rollout_engines

    def update_weights(self) -> None: ...

    def _for_each_hf_bucket(self, bucket_func: Callable[[Bucket, Any], None]) -> None:
        for weight in self.weights_getter().items():
            bucket_func([weight], None)
        dist.barrier(group=get_gloo_group())


class SlimeEngine:
    """An engine's actor: it keeps what it was called, and the weights that it has loaded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, Tensor] = {}
        self.failing: Exception | None = None
        self.answer: Any = {"success": True, "message": "Succeeded"}
        self._mirrors: dict[str, HostSubscriber] = {}

    def pause_generation(self) -> None:
        self.calls.append("pause")

    def continue_generation(self) -> None:
        self.calls.append("continue")

    def flush_cache(self) -> None:
        self.calls.append("flush")

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, weight_version: str | None = None
    ) -> Any:
        """Do what sparcel's plugin in SGLang does."""
        self.calls.append(f"load {weight_version}")
        if self.failing is not None:
            raise self.failing
        told = json.loads(unquote(model_path.removeprefix("sparcel:")))
        version, place = Version.read(told["version"]), told["mirror"]
        mirror = self._mirrors.setdefault(place, HostSubscriber(told["store"], place))
        for _ in mirror.updates(version.number):
            pass
        assert mirror.version == version
        assert load_format == "safetensors"
        self.weights = {name: tensor.clone() for name, tensor in mirror.tensors.items()}
        return self.answer


class MilesEngine(SlimeEngine):
    def pause_generation(self, mode: str = "retract") -> None:
        self.calls.append(f"pause {mode}")


class Actor:
    """A handle of an actor, whose methods are called once Ray is asked for their results."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *args, **told: lambda: method(*args, **told))


def get(calls: list[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


_UPDATES = "backends.megatron_utils.update_weight"
PLACES = {
    "slime": f"slime.{_UPDATES}.update_weight_from_disk_delta",
    "miles": f"miles.{_UPDATES}.update_weight_from_distributed.delta",
}
UPDATERS = {"slime": SlimeUpdater, "miles": MilesUpdater}
ENGINES = {"slime": SlimeEngine, "miles": MilesEngine}


def modules(package: str) -> dict[str, dict[str, Any]]:
    names = {"get_gloo_group": get_gloo_group, "ray": SimpleNamespace(get=get)}
    return {PLACES[package]: {"UpdateWeightFromDiskDelta": UPDATERS[package], **names}}
