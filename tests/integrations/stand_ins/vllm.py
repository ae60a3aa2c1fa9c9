"""Stand-ins for what `sparcel.integrations.vllm` uses of vLLM, with the signatures of vLLM 0.33.0.

They are written from its documented interface, and do what that says, for whole tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC):
    init_info_cls: type
    update_info_cls: type
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return _parsed(self.init_info_cls, init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return _parsed(self.update_info_cls, update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        torch.accelerator.synchronize()

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


def _parsed(kind: type, told: dict[str, Any]) -> Any:
    try:
        return kind(**told)
    except TypeError as error:
        raise ValueError(str(error)) from error


class WeightTransferEngineFactory:
    _registry: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def register_engine(
        cls, name: str, module_path_or_cls: Any, class_name: str | None = None
    ) -> None:
        if name in cls._registry:
            raise ValueError(f"{name} is already registered")
        cls._registry[name] = (module_path_or_cls, class_name)

    @classmethod
    def create_engine(
        cls, config: Any, vllm_config: Any, device: torch.device, model: nn.Module
    ) -> Any:
        module, name = cls._registry[config.backend]
        return getattr(import_module(module), name)(config, vllm_config, device, model)


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None = None


def load_checkpoint_weight_patches(
    model: nn.Module,
    patches: Iterable[CheckpointWeightPatch],
    *,
    max_chunk_bytes: int = 512 << 20,
    validate_unique_indices: bool = True,
) -> set[str]:
    weights = []
    for patch in patches:
        assert patch.indices is not None, "only sparse patches are stood in for"
        if not patch.dtype.is_floating_point:
            raise TypeError(f"{patch.name}: NaN must be able to mark what is unchanged")
        if patch.values.isnan().any():
            raise ValueError(f"{patch.name}: a new value is NaN")
        flat = torch.full((math.prod(patch.shape),), math.nan, dtype=patch.dtype)
        flat[patch.indices.long()] = patch.values
        weights.append((patch.name, flat.view(patch.shape)))
    copy = Tensor.copy_

    def copy_but_nan(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if self.shape != source.shape or not self.is_floating_point():
            raise NotImplementedError("patches need a final copy of the same shape")
        return copy(self, torch.where(source.isnan(), self, source.to(self.dtype)))

    Tensor.copy_ = copy_but_nan  # type: ignore[method-assign]
    try:
        return set(model.load_weights(weights))  # type: ignore[operator]
    finally:
        Tensor.copy_ = copy  # type: ignore[method-assign]


class Platform:
    cpu = False

    def is_cpu(self) -> bool:
        return self.cpu


def record_metadata_for_reloading(model: nn.Module) -> None:
    pass


def initialize_layerwise_reload(model: nn.Module) -> None:
    pass


def finalize_layerwise_reload(*args: Any, **kwargs: Any) -> None:
    pass


MODULES: dict[str, dict[str, Any]] = {
    "vllm.distributed.weight_transfer.base": {
        one.__name__: one
        for one in (WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo)
    },
    "vllm.distributed.weight_transfer.factory": {
        "WeightTransferEngineFactory": WeightTransferEngineFactory
    },
    "vllm.platforms": {"current_platform": Platform()},
    "vllm.model_executor.model_loader.checkpoint_weight_patch": {
        "CheckpointWeightPatch": CheckpointWeightPatch,
        "load_checkpoint_weight_patches": load_checkpoint_weight_patches,
    },
    "vllm.model_executor.model_loader.reload": {
        one.__name__: one
        for one in (
            record_metadata_for_reloading,
            initialize_layerwise_reload,
            finalize_layerwise_reload,
        )
    },
}
