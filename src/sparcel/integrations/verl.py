"""verl: a checkpoint engine whose weights travel through a store, as deltas.

Importing this module, which ``custom_backend_module`` tells verl to do, registers it as
``sparcel``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from torch import Tensor

from sparcel.errors import optional
from sparcel.integrations._deltas import Passage, facts_of

with optional("sparcel.integrations.verl"):
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("sparcel")
class SparcelCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Publishes the actor's weights, and yields them in rollout workers.

    Only deltas travel, and rollout workers join no group of processes, so replicas may come and go.
    The actor's ranks share the work: each compares, codes and writes a share of the tensors, and
    keeps that on its host. **The rollout workers of a host keep a mirror of the whole model**, one
    together with ``mirror``, and else each its own. They hand all of it to their inference engines
    at each step, as verl's other engines do.

    Parameters
    ----------
    bucket_size, is_master
        What verl passes.
    store
        A path or URL, as for `sparcel.delta.store_at`, valid on all hosts.
    dtype
        The name of the dtype that wider floats become before they are compared; None keeps all.
        Of float32 weights nearly every bit pattern changes in a step.
    mirror
        A folder on each rollout host, such as ``/dev/shm/run``, for the mirror that its workers
        share. All of them must get each version.
    publisher
        As for `sparcel.delta.ShardedPublisher`.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        store: str,
        is_master: bool = False,
        dtype: str | None = "bfloat16",
        mirror: str | None = None,
        **publisher: Any,
    ) -> None:
        self._passage, self._is_master = Passage(store, dtype, mirror, publisher), is_master
        self._number = 0

    def prepare(self) -> dict[str, Any]:
        """Return on the master the number of the version to come."""
        return {"version": self._passage.next_number()} if self._is_master else {}

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
        """Do nothing: copies and mirrors stay, for the next version."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the weights on all ranks of the actor; return on the master what that took."""
        version = self._passage.publish(weights, self._number)
        if not self._is_master:
            return {}
        share, size = facts_of(self._passage.store, version)
        return {
            "checkpoint_engine/changed_ratio": share,
            "checkpoint_engine/payload_mbytes": size / (1 << 20),
        }

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Wait for the version that was announced, and yield all weights on this device."""
        for _ in await self._passage.updates(self._number):
            pass
        for weight in self._passage.weights():
            yield weight
