"""What the callback and the strategy share about models of fully_shard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import FSDPModule

from sparcel.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from sparcel.training import Handle

DIMENSIONS = ("replicate", "shard")
"""The names of the dimensions of the strategy's mesh."""

_FOLDER = "sparcel"
"""The folder that holds the memory, in that of the checkpoint."""


def replicas(strategy: Any) -> DeviceMesh | None:
    """Return the ranks that hold the same shard, if it is a strategy that has them."""
    mesh = getattr(strategy, "device_mesh", None)
    found: DeviceMesh | None = None
    if mesh is not None and mesh.mesh_dim_names == DIMENSIONS:
        found = mesh[DIMENSIONS[0]]
    return found


def root(module: nn.Module) -> nn.Module:
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


def save(state: dict[str, Tensor], checkpoint: Path) -> None:
    """Save the shards of all ranks beside those of the model; all ranks call."""
    state_dict_saver.save(state, checkpoint_id=checkpoint / _FOLDER)


def load(handle: Handle, checkpoint: str | Path) -> dict[str, Tensor]:
    """Return this rank's shards of what a checkpoint holds, which may be nothing; all call."""
    folder = Path(checkpoint, _FOLDER)
    if not folder.is_dir():
        return {}
    saved_by = {"world_size": torch.tensor(0)}
    state_dict_loader.load(saved_by, checkpoint_id=folder)
    state = handle.state_dict(int(saved_by["world_size"]))
    state_dict_loader.load(state, checkpoint_id=folder)
    return state
