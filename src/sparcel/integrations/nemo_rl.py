"""NeMo-RL: a checkpoint engine whose weights travel through a store, as deltas.

The setting ``policy.generation.refit_transport: "sparcel.integrations.nemo_rl:Engine"`` selects it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from torch import Tensor

from sparcel.errors import optional
from sparcel.integrations._deltas import Passage
from sparcel.products.delta import Version

with optional("sparcel.integrations.nemo_rl"):
    from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine


class Engine(CheckpointEngine):  # type: ignore[misc]
    """Publishes the policy's weights, and yields in vLLM's workers those that have changed.

    The policy's ranks share the work: each compares, codes and writes a share of the tensors, and
    keeps that on its host. **The vLLM workers of a host keep a mirror of the whole model**, one
    together with ``mirror``, and else each its own. vLLM gets all tensors the first time, and after
    an error; then those of which some element has changed.

    Parameters
    ----------
    bucket_size, release_after_refit
        What NeMo-RL passes. A batch of tensors for vLLM has ``bucket_size`` bytes at most, or is
        one tensor.
    store
        A path or URL, as for `sparcel.delta.store_at`, valid on all hosts.
    dtype
        The name of the dtype that wider floats become before they are compared, such as
        ``bfloat16`` where the policy's precision is float32; None keeps all.
    mirror
        A folder on each host of vLLM, such as ``/dev/shm/run``, for the mirror that its workers
        share.
    publisher
        As for `sparcel.delta.ShardedPublisher`.
    """

    def __init__(
        self,
        bucket_size: int,
        store: str,
        release_after_refit: bool = False,
        dtype: str | None = None,
        mirror: str | None = None,
        **publisher: Any,
    ) -> None:
        self._passage, self._most_bytes = Passage(store, dtype, mirror, publisher), bucket_size
        self._number = 0
        self._loaded: Version | None = None
        """What vLLM's model is, if it is a version."""

    def prepare(self) -> dict[str, Any]:
        """Return the number of the version to come."""
        return {"version": self._passage.next_number()}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],
    ) -> None:
        """Note the number that the policy's rank 0 has found; there is no group."""
        self._number = metadata[0]["version"]

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],
    ) -> None:
        """Note the number that the policy's rank 0 has found; there is no group."""
        self._number = metadata[0]["version"]

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Publish the weights on all ranks of the policy."""
        self._passage.publish(weights, self._number)
        self._number += 1

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, Tensor]]]:
        """Wait for the next version, and yield what has changed, on this device."""
        before, self._loaded = self._loaded, None  # until all is loaded
        changed: set[str] = set()
        for update in await self._passage.updates(self._number):
            if before is not None and update.base == before:
                changed.update(change.name for change in update.changes())
                before = update.version
            else:
                before = None
        is_whole = before != self._passage.version
        batch: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._passage.weights(None if is_whole else changed):
            if batch and size + tensor.nbytes > self._most_bytes:
                yield batch
                batch, size = [], 0
            batch.append((name, tensor))
            size += tensor.nbytes
        if batch:
            yield batch
        self._loaded = self._passage.version
        self._number += 1
