"""SkyRL: vLLM servers follow a trainer through a store.

SkyRL has no registry of ways to sync weights: two functions choose one by its name. `install`
replaces them, so that the name ``delta`` means sparcel. Another name would not do: for all but
``delta``, SkyRL pauses servers while weights are published, and resumes them after an error; and it
checks for ``delta`` that nothing is configured that drops a server's weights between versions.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.errors import InputError, optional
from sparcel.integrations._deltas import agreed
from sparcel.products.delta import ShardedPublisher, Version

with optional("sparcel.integrations.skyrl"):
    from skyrl.backends.skyrl_train import weight_sync
    from skyrl.backends.skyrl_train.weight_sync import (
        WeightSyncInitInfo,
        WeightTransferSender,
        WeightTransferStrategy,
    )

_IMPORTED_FROM = "skyrl.backends.skyrl_train.inference_servers.utils"
"""Where SkyRL keeps a name of its own for a function that is replaced."""


def install() -> None:
    """Let ``weight_sync_backend: delta`` mean sparcel in this process.

    Each process of the Ray job needs that, as its ``worker_process_setup_hook``. The store is
    ``delta_weight_sync.sync_dir``, and each host of servers keeps a mirror in
    ``delta_weight_sync.local_checkpoint_dir``.
    """
    theirs = weight_sync.get_transfer_strategy_cls, weight_sync.get_transfer_strategy

    def strategy_class(weight_sync_backend: str, colocate_all: bool) -> type:
        if weight_sync_backend == "delta":
            return Strategy
        found: type = theirs[0](weight_sync_backend, colocate_all)
        return found

    def strategy(weight_sync_backend: str, colocate_all: bool) -> str:
        if weight_sync_backend != "delta":
            return str(theirs[1](weight_sync_backend, colocate_all))
        if colocate_all:
            raise InputError("servers on the trainer's devices drop their weights: use nccl there")
        return "sparcel"

    weight_sync.get_transfer_strategy_cls = strategy_class
    weight_sync.get_transfer_strategy = strategy
    if _IMPORTED_FROM in sys.modules:
        sys.modules[_IMPORTED_FROM].get_transfer_strategy = strategy  # type: ignore[attr-defined]


@dataclass
class InitInfo(WeightSyncInitInfo):  # type: ignore[misc]
    """What servers are told once: those of a host share the mirror."""

    store: str
    mirror: str | None

    def for_servers(
        self, world_size_per_server: int, num_servers: int, dp_size: int = 1
    ) -> list[InitInfo]:
        """Return what each server is told."""
        return [self] * num_servers

    def to_api_payload(self) -> dict[str, Any]:
        """Return what sparcel's engine in vLLM takes."""
        return {"store": self.store, "mirror": self.mirror}


class Sender(WeightTransferSender):  # type: ignore[misc]
    """Publishes weights from all ranks of the trainer, and lets servers load them.

    Each rank compares, codes and writes a share of the tensors, and keeps that on its host.
    """

    handles_prefix_cache_reset = True

    def __init__(self, init_info: InitInfo, inference_client: Any) -> None:
        self._client = inference_client
        self._group = dist.new_group(backend="gloo")
        self._publisher = ShardedPublisher(init_info.store, self._group)

    async def send_chunks(
        self,
        chunks: Iterable[Any],
        weight_metadata: dict[str, list[Any]] | None = None,
        reset_prefix_cache: bool = False,
    ) -> None:
        """Publish the weights, and let all servers load the version; all ranks call.

        If anything fails, all ranks raise, and servers that have been paused stay paused.
        """
        weights = (pair for one in chunks for pair in zip(one.names, one.tensors, strict=True))
        device = (
            torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        )
        version = await asyncio.to_thread(self._publish, weights, device)
        failure = None
        if dist.get_rank() == 0:
            try:
                await self._serve(version, reset_prefix_cache)
            except Exception as error:
                failure = error
        await asyncio.to_thread(agreed, failure, self._group)

    @torch.no_grad()
    def _publish(self, weights: Iterable[tuple[str, Tensor]], device: int | None) -> Version:
        """Publish in another thread, in which SkyRL gathers on this rank's device."""
        if device is not None:
            torch.accelerator.set_device_index(device)
        return self._publisher.publish_gathered(weights)

    async def _serve(self, version: Version, reset_prefix_cache: bool) -> None:
        client = self._client
        await client.pause_generation()
        if reset_prefix_cache:
            await client.reset_prefix_cache(reset_running_requests=True)
        # As a checkpoint, SkyRL would reload all layers around what sparcel's engine does.
        await client.start_weight_update(is_checkpoint_format=False)
        try:
            await client.update_named_weights({"version": version.number})
        finally:
            await client.finish_weight_update()
        await client.resume_generation()

    def teardown(self) -> None:
        """Do nothing: trainer and servers are in no group."""


class Strategy(WeightTransferStrategy):  # type: ignore[misc]
    """What SkyRL asks for the two above."""

    @staticmethod
    def create_init_info(
        ie_cfg: Any, inference_world_size: int | None = None, base_model_path: str | None = None
    ) -> InitInfo:
        """Return what SkyRL's settings say."""
        told = ie_cfg.delta_weight_sync
        if told is None or not told.sync_dir:
            raise InputError("generator.inference_engine.delta_weight_sync.sync_dir names no store")
        return InitInfo(not ie_cfg.run_engines_locally, told.sync_dir, told.local_checkpoint_dir)

    @staticmethod
    def create_sender(init_info: InitInfo, inference_client: Any) -> Sender:
        """Open the store; all ranks call."""
        return Sender(init_info, inference_client)

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        """Return sparcel's engine in vLLM, which finds it by itself."""
        from sparcel.integrations.vllm.engine import Engine

        return Engine
