"""Lightning: a callback lets sparcel exchange gradients, with DDP or a strategy for FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sparcel.errors import InputError, optional
from sparcel.integrations import attach_wrapped, load_or_warn

with optional("sparcel.integrations.lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

if TYPE_CHECKING:
    from sparcel.core.schemes import Scheme
    from sparcel.core.training import Handle

__all__ = ["HybridShardStrategy", "Sparcel"]

_WAY_OUT = (
    'pass strategy="ddp" to the Trainer, or HybridShardStrategy() for models of fully_shard, or'
    " leave the callback out"
)
_DIMENSIONS = ("replicate", "shard")
_FOLDER = "sparcel"
"""The folder that holds the memory of sharded models, in that of the checkpoint."""


class Sparcel(Callback):  # type: ignore[misc]
    """Lets sparcel exchange the gradients of each `Trainer.fit`, with DDP or `HybridShardStrategy`.

    Each fit begins with an empty memory, unless ``ckpt_path`` gives it one. Checkpoints hold the
    memory of all ranks, also those that are saved after the fit. One process alone trains as it
    does without the callback.

    Parameters
    ----------
    scheme_or_name, arguments
        As for `sparcel.attach`: ``Sparcel("topk", density=0.01)``. The optimiser, if there is only
        one, and the scaler of mixed precision are found.

    Attributes
    ----------
    handle
        That of the last fit; None before training starts, and in one process alone. It is closed
        when training ends, and its statistics stay.

    Raises
    ------
    InputError
        When a fit begins, for another strategy, and for what `sparcel.attach` refuses.

    Warns
    -----
    SparcelWarning
        When a fit begins in one process alone, or from a checkpoint that holds no memory.
    """

    state_key = "sparcel"  # of subclasses, too: the strategy looks for it in checkpoints

    def __init__(self, scheme_or_name: Scheme | str | None = None, **arguments: Any) -> None:
        self.handle: Handle | None = None
        self._arguments = {"scheme_or_name": scheme_or_name, **arguments}
        self._sharded = False
        self._state: dict[str, Tensor] = {}
        """What a checkpoint held, until training begins; what the training ended with, after it."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the fit before, and what was loaded for a test."""
        if stage == "fit":
            self._close()
            self.handle, self._state = None, {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model, which is wrapped now, and load what the checkpoint holds."""
        arguments: dict[str, Any] = {"scaler": getattr(trainer.precision_plugin, "scaler", None)}
        if len(trainer.optimizers) == 1:
            arguments["optimizer"] = trainer.optimizers[0]
        strategy, checkpoint = trainer.strategy, trainer.ckpt_path
        model, copies = strategy.model, trainer.world_size
        self._sharded = isinstance(strategy, HybridShardStrategy)
        if self._sharded:
            model, replicas = _sharded_part(pl_module), strategy.device_mesh[_DIMENSIONS[0]]
            arguments["replicate"], copies = replicas, replicas.size()
        self.handle = attach_wrapped(model, copies, _WAY_OUT, arguments | self._arguments)
        if self.handle is not None and checkpoint is not None:
            saved = _loaded(self.handle, Path(checkpoint)) if self._sharded else self._state
            load_or_warn(self.handle, saved, checkpoint)
            self._state = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the exchange; checkpoints can still be saved."""
        self._state = self.state_dict()
        self._close()

    def state_dict(self) -> dict[str, Tensor]:
        """Return what all ranks remember, or this rank's shards of it; all ranks call."""
        if self.handle is None or self.handle.closed:
            return self._state
        return self.handle.state_dict() if self._sharded else self.handle.full_state_dict()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Keep what a checkpoint holds until the model is wrapped."""
        self._state = state_dict

    def _close(self) -> None:
        if self.handle is not None:
            self.handle.close()


class HybridShardStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """Shards a model inside of each node by FSDP2; the callback `Sparcel` averages across nodes.

    The module's ``configure_model`` applies ``fully_shard`` over ``self.device_mesh["shard"]``, to
    its parts and at last to one part that has all parameters. Every rank has batches of its own.
    Checkpoints are folders, and other numbers of ranks load them too.

    Parameters
    ----------
    replicas, shards
        How many times there is the model, and over how many ranks each is sharded. By default the
        number of nodes, and of the devices of a node.
    process_group_backend, timeout
        As for Lightning's ModelParallelStrategy.

    Raises
    ------
    InputError
        When a fit begins without the callback `Sparcel`: nobody would average the replicas.
    """

    def __init__(
        self,
        replicas: int | Literal["auto"] = "auto",
        shards: int | Literal["auto"] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        settings: dict[str, Any] = {"process_group_backend": process_group_backend}
        if timeout is not None:
            settings["timeout"] = timeout
        super().__init__(data_parallel_size=replicas, tensor_parallel_size=shards, **settings)

    def setup_environment(self) -> None:
        """Name the dimensions of the mesh by what they are for."""
        super().setup_environment()
        self._device_mesh = init_device_mesh(
            self.root_device.type, self.device_mesh.shape, mesh_dim_names=_DIMENSIONS
        )
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Trainer) -> None:
        """Begin with the same model in all replicas, if somebody averages them."""
        if trainer.training and not any(isinstance(one, Sparcel) for one in trainer.callbacks):
            raise InputError(
                "HybridShardStrategy leaves averaging over the replicas to sparcel; pass"
                " callbacks=[Sparcel()] to the Trainer"
            )
        super().setup(trainer)
        group = self.device_mesh.get_group(_DIMENSIONS[0])
        for tensor in chain(self.model.parameters(), self.model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            dist.broadcast(local.detach(), group=group, group_src=0)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add up the gradients of several batches, and average the replicas with the last one."""
        model: Any = _sharded_part(self.lightning_module)
        model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            model.set_requires_all_reduce(True)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Tell that every rank has batches of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, and the shards of the memory beside those of the model."""
        memory = checkpoint.get("callbacks", {}).pop(Sparcel.state_key, {})
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if memory:
            state_dict_saver.save(memory, checkpoint_id=Path(self.broadcast(filepath), _FOLDER))


def _sharded_part(module: nn.Module) -> nn.Module:
    """Return the part of a module that fully_shard was applied to, which has all parameters.

    Lightning calls the module's own methods, past the hooks that fully_shard gives the module.
    """
    found = next((one for one in module.modules() if isinstance(one, FSDPModule)), module)
    inside = set(found.parameters())
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter not in inside:
            raise InputError(
                "configure_model must apply fully_shard to one part of the module that has all"
                f" parameters, and {name!r} is outside of it, so nobody would average it"
            )
    return found


def _loaded(handle: Handle, checkpoint: Path) -> dict[str, Tensor]:
    """Return this rank's shards of what a checkpoint holds, which may be nothing; all call."""
    folder = checkpoint / _FOLDER
    if not folder.is_dir():
        return {}
    saved_by = {"world_size": torch.tensor(0)}
    state_dict_loader.load(saved_by, checkpoint_id=folder)
    state = handle.state_dict(int(saved_by["world_size"]))
    state_dict_loader.load(state, checkpoint_id=folder)
    return state
