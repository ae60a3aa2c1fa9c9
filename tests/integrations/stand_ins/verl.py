"""Stand-ins for what `sparcel.integrations.verl` uses of verl, with the signatures of 0.9.1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor


class CheckpointEngineRegistry:
    _registry: dict[str, Any] = {}  # noqa: RUF012

    def register(backend: str) -> Callable[[Any], Any]:  # type: ignore[misc]  # noqa: N805
        def wrapper(cls: Any) -> Any:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls._registry[backend](*args, **kwargs)


class CheckpointEngine(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(
        self,
        weights: Generator[tuple[str, Tensor], None, None],
        global_steps: int | None = None,
    ) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


MODULES: dict[str, dict[str, Any]] = {
    "verl.checkpoint_engine": {
        "CheckpointEngine": CheckpointEngine,
        "CheckpointEngineRegistry": CheckpointEngineRegistry,
    }
}
