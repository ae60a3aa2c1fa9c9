"""A stand-in for what `sparcel.integrations.nemo_rl` uses, with the signatures of NeMo-RL 0.7."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator
from typing import Any

from torch import Tensor


class CheckpointEngine(ABC):
    shard_expert_weights = False

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        return None

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None: ...

    def finalize(self) -> None: ...  # noqa: B027 - as theirs

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, Tensor], None, None]) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Tensor]], None]: ...


MODULES: dict[str, dict[str, Any]] = {
    "nemo_rl.utils.checkpoint_engines.base": {"CheckpointEngine": CheckpointEngine}
}
