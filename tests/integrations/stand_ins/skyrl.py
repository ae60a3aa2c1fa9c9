"""Stand-ins for what `sparcel.integrations.skyrl` uses of SkyRL, with signatures of a9564572."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sparcel.products.delta import Subscriber


@dataclass
class WeightSyncInitInfo(ABC):
    override_existing_receiver: bool


class WeightTransferSender(ABC):
    handles_prefix_cache_reset: bool = False

    @abstractmethod
    async def send_chunks(
        self,
        chunks: Iterable[Any],
        weight_metadata: dict[str, list[Any]] | None = None,
        **kwargs: Any,
    ) -> None: ...

    @abstractmethod
    def teardown(self) -> None: ...


class WeightTransferStrategy(ABC):
    @staticmethod
    @abstractmethod
    def create_init_info(
        ie_cfg: Any, inference_world_size: int | None = None, base_model_path: str | None = None
    ) -> Any: ...

    @staticmethod
    @abstractmethod
    def get_vllm_transfer_engine() -> type: ...

    @staticmethod
    @abstractmethod
    def create_sender(init_info: Any, inference_client: Any) -> Any: ...


@dataclass
class WeightChunk:
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    tensors: list[Tensor]


class DeltaWeightTransferSender:
    """What SkyRL calls with an argument more than its base."""

    async def send_chunks(
        self,
        chunks: Iterable[Any],
        weight_metadata: dict[str, list[Any]] | None = None,
        reset_prefix_cache: bool = False,
    ) -> None: ...


class DeltaInitInfo:
    def for_servers(
        self, world_size_per_server: int, num_servers: int, dp_size: int = 1
    ) -> list[Any]: ...

    def to_api_payload(self) -> dict[str, Any]: ...


class Broadcast: ...


def get_transfer_strategy_cls(weight_sync_backend: str, colocate_all: bool) -> type:
    return Broadcast


def get_transfer_strategy(weight_sync_backend: str, colocate_all: bool) -> str:
    return "ipc" if colocate_all else "nccl"


class RemoteInferenceClient:
    """It calls two servers, of which it keeps the routes; they load as sparcel's engine does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.told: list[dict[str, Any]] = []
        self.weights: dict[str, Tensor] = {}
        self.failing: Exception | None = None

    async def init_weight_update_communicator(self, init_info: Any) -> dict[str, Any]:
        self.told = [one.to_api_payload() for one in init_info.for_servers(8, 2, dp_size=1)]
        self._subscriber = Subscriber(Path(self.told[0]["store"]))
        return {}

    async def pause_generation(self, clear_cache: bool = False) -> dict[str, Any]:
        self.calls.append("pause")
        return {}

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Any]:
        self.calls.append(f"reset {reset_running_requests}")
        return {}

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> dict[str, Any]:
        self.calls.append(f"start {is_checkpoint_format}")
        return {}

    async def update_named_weights(self, update_info: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(f"load {update_info['version']}")
        if self.failing is not None:
            raise self.failing
        self._subscriber.update(update_info["version"])
        self.weights = {name: one.clone() for name, one in self._subscriber.tensors.items()}
        return {}

    async def finish_weight_update(self) -> dict[str, Any]:
        self.calls.append("finish")
        return {}

    async def resume_generation(self) -> dict[str, Any]:
        self.calls.append("resume")
        return {}


PLACE = "skyrl.backends.skyrl_train.weight_sync"
SERVERS = "skyrl.backends.skyrl_train.inference_servers"
CLASSES = (WeightSyncInitInfo, WeightTransferSender, WeightTransferStrategy, WeightChunk)
FUNCTIONS = (get_transfer_strategy_cls, get_transfer_strategy)
MODULES: dict[str, dict[str, Any]] = {
    PLACE: {one.__name__: one for one in (*CLASSES, *FUNCTIONS)},
    f"{SERVERS}.utils": {"get_transfer_strategy": get_transfer_strategy},
}
