"""The strategy that shards a model over some ranks, and has several of them (HSDP)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from sparcel.errors import InputError
from sparcel.integrations.lightning import _sharded
from sparcel.integrations.lightning.callback import Sparcel


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
            self.root_device.type, self.device_mesh.shape, mesh_dim_names=_sharded.DIMENSIONS
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
        group = self.device_mesh.get_group(_sharded.DIMENSIONS[0])
        for tensor in chain(self.model.parameters(), self.model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            dist.broadcast(local.detach(), group=group, group_src=0)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add up the gradients of several batches, and average the replicas with the last one."""
        model: Any = _sharded.root(self.lightning_module)
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
            _sharded.save(memory, Path(self.broadcast(filepath)))
