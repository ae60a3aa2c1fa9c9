"""verl: a checkpoint engine whose weights travel through a store, as deltas.

Importing this module, which ``custom_backend_module`` tells verl to do, registers it as
``sparcel``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from torch import Tensor

from sparcel.delta import Publisher, Subscriber, read_index, store_at
from sparcel.delta.index import index_in
from sparcel.integrations._framework import needs
from sparcel.integrations._weights import on_host

with needs("verl"):
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

_SECONDS = 0.2
"""How long rollout workers wait before they look into the store again."""


@CheckpointEngineRegistry.register("sparcel")
class SparcelCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Publishes the actor's weights, and yields them in rollout workers.

    Only deltas travel, and no group of processes is formed, so replicas may come and go. **Each
    rollout worker keeps a mirror of the whole model** in the memory of its host, and hands all of
    it to its inference engine at each step, as verl's other engines do. Rank 0 of the actor holds
    the whole model there twice.

    Parameters
    ----------
    bucket_size, is_master
        What verl passes.
    store
        A path or URL, as for `sparcel.delta.store_at`, valid on all hosts.
    dtype
        The name of the dtype that wider floats become before they are compared; None keeps all.
        Of float32 weights nearly every bit pattern changes in a step.
    publisher
        As for `sparcel.delta.Publisher`.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        store: str,
        is_master: bool = False,
        dtype: str | None = "bfloat16",
        **publisher: Any,
    ) -> None:
        self._store, self._is_master = store_at(store), is_master
        self._dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
        self._arguments = publisher
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        self._number = 0

    def prepare(self) -> dict[str, Any]:
        """Return on the master the number of the version to come."""
        if not self._is_master:
            return {}
        if self._publisher is None:
            self._publisher = Publisher(self._store, **self._arguments)
        newest = index_in(self._store).newest
        return {"version": 0 if newest is None else newest.number + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell all workers the number of the version to come."""
        number = metadata[0]["version"]
        return {"version": [number] * actor_wg_world_size}, {
            "version": [number] * rollout_world_size
        }

    def init_process_group(self, version: int) -> None:
        """Note the number; there is no group."""
        self._number = version

    def finalize(self) -> None:
        """Do nothing: copy and mirror stay, for the next version."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the weights, and return what that took; ranks but the master only gather."""
        if self._publisher is None:
            for _ in weights:
                pass
            return {}
        version = self._publisher.publish(on_host(weights, self._dtype), self._number)
        entries = read_index(self._store).entries
        entry = next(entry for entry in entries if entry.version == version)
        return {
            "checkpoint_engine/changed_ratio": entry.changed / entry.elements,
            "checkpoint_engine/payload_mbytes": entry.bytes / (1 << 20),
        }

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Wait for the version that was announced, and yield all weights on this device."""
        if self._subscriber is None:
            self._subscriber = Subscriber(self._store)
        while (newest := read_index(self._store).newest) is None or newest.number < self._number:
            await asyncio.sleep(_SECONDS)
        self._subscriber.update(self._number)
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        for name, tensor in self._subscriber.tensors.items():
            yield name, tensor.to(device)
