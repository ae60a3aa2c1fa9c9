"""slime and Miles: SGLang servers follow a Megatron trainer through a store.

Both let ``--custom-megatron-init-path`` name a function, here `install`; neither lets anything name
an updater of weights. So `install` puts one in the place of their delta updater, whose arguments it
takes over.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.errors import CommunicationError, InputError
from sparcel.integrations._deltas import agreed, facts_of, on_host
from sparcel.integrations.sglang import path_of
from sparcel.products.delta import ShardedPublisher, Version

_UPDATES = "backends.megatron_utils.update_weight"
_PLACES = {
    "slime": f"slime.{_UPDATES}.update_weight_from_disk_delta",
    "miles": f"miles.{_UPDATES}.update_weight_from_distributed.delta",
}
"""The module of each framework that has its delta updater."""


def install(args: Namespace) -> None:
    """Let the framework that calls this update weights by sparcel.

    The store is ``--update-weight-disk-dir``. Each host of engines keeps a mirror in
    ``--update-weight-local-checkpoint-dir``, which its engines share.

    Raises
    ------
    InputError
        If the arguments choose another updater, or something else calls.
    """
    mode = getattr(args, "update_weight_mode", None)
    if mode != "delta" and getattr(args, "update_weight_transfer_mode", None) != "disk-delta":
        raise InputError(
            "sparcel takes the place of the delta updater, which these arguments do not choose:"
            " pass --update-weight-mode delta --update-weight-transport disk to slime, or"
            " --update-weight-transfer-mode disk-delta to Miles"
        )
    place = next((place for name, place in _PLACES.items() if name in sys.modules), None)
    if place is None:
        raise InputError("slime or Miles must call this: --custom-megatron-init-path names it")
    module: Any = import_module(place)
    theirs = module.UpdateWeightFromDiskDelta
    if not issubclass(theirs, _Updates):
        group = staticmethod(module.get_gloo_group)
        names = {"_all_ranks": group, "_ray": module.ray}
        module.UpdateWeightFromDiskDelta = type("UpdateWeightBySparcel", (_Updates, theirs), names)


class _Updates:
    """Replaces ``update_weights`` of a delta updater, which knows the model and the engines.

    If anything fails, all ranks raise, and engines that have been paused stay paused: their weights
    may be no version.
    """

    args: Namespace
    rollout_engines: Sequence[Any]
    _all_ranks: Callable[[], dist.ProcessGroup]
    _ray: Any

    _group: dist.ProcessGroup | None = None

    @torch.no_grad()
    def update_weights(self) -> None:
        """Publish what this rank gathers, and let all engines load the version; all ranks call."""
        group = self._all_ranks()
        if group is not self._group:  # slime makes another one when it has offloaded the trainer
            self._publisher = ShardedPublisher(self.args.update_weight_disk_dir, group)
            self._group = group
        stage, failure = self._gathered()
        agreed(failure, group)
        version = self._publisher.publish(stage)
        self.weight_version = version.number
        metrics: dict[str, float] | Exception | None = None
        if dist.get_rank() == 0:
            try:
                self._serve(version)
                metrics = self._told(version)
            except Exception as error:
                metrics = error
        self.update_weight_metrics = agreed(metrics, group)

    def _gathered(self) -> tuple[dict[str, Tensor], Exception | None]:
        """Return whole tensors of this rank's stage, or none; and what failed.

        Ranks gather together, so this one goes on whatever fails here.
        """
        stage: dict[str, Tensor] = {}
        failures: list[Exception] = []

        def keep(bucket: Iterable[tuple[str, Tensor]], bar: object = None) -> None:
            try:
                stage.update(on_host(bucket, None))
            except Exception as error:
                failures.append(error)

        if walk := getattr(self, "_for_each_hf_bucket", None):  # Miles
            walk(keep)
        else:
            keep(self._iter_hf_tensors())  # type: ignore[attr-defined]  # slime
        return stage, failures[0] if failures else None

    def _serve(self, version: Version) -> None:
        """Let all engines load a version, at the same time: those of a host share a mirror."""
        mode = getattr(self.args, "pause_generation_mode", None)  # Miles
        self._on_engines("pause_generation", **({} if mode is None else {"mode": mode}))
        if mode != "in_place":
            self._on_engines("flush_cache")
        self._on_engines(
            "update_weights_from_disk",
            model_path=path_of(
                version,
                self.args.update_weight_disk_dir,
                self.args.update_weight_local_checkpoint_dir,
            ),
            load_format="safetensors",
            weight_version=str(version.number),
        )
        self._on_engines("continue_generation")

    def _on_engines(self, method: str, **told: Any) -> None:
        calls = [getattr(engine, method).remote(**told) for engine in self.rollout_engines]
        for answer in self._ray.get(calls):
            if isinstance(answer, Mapping) and answer.get("success") is False:
                raise CommunicationError(f"{method} of an engine: {answer.get('message')}")

    def _told(self, version: Version) -> dict[str, float]:
        share, size = facts_of(self.args.update_weight_disk_dir, version)
        return {"perf/update_weights_density": share, "perf/update_weights_wire_bytes": size}
