"""Which models `attach` accepts: those that FSDP2 shards, and does not average over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from sparcel._checks import check_type
from sparcel.errors import InputError, warn_on_rank_0
from sparcel.fsdp.groups import Group
from sparcel.fsdp.hook import GroupHook
from sparcel.fsdp.ranks import MESH

_SHARD = f'{MESH}; fully_shard(module, mesh=mesh["shard"]) for each block and for the model'
_ATTACH = 'sparcel.attach(model, replicate=mesh["replicate"])'


def checked_root(model: object) -> nn.Module:
    """Return a model that FSDP was applied to as a whole, or raise an `InputError`."""
    if isinstance(model, FSDPModule) and isinstance(model, nn.Module):
        return model
    check_type(model, nn.Module, "model")
    assert isinstance(model, nn.Module)
    inside = [path for path, one in model.named_modules() if isinstance(one, FSDPModule)]
    if not inside:
        raise InputError(
            f"replicate= is for models of fully_shard, and the model is a {type(model).__name__};"
            f" {_SHARD}; or leave replicate out for DistributedDataParallel"
        )
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "the model is compiled; attach before that: sparcel.attach(model, ...) and then"
            " torch.compile(model)"
        )
    raise InputError(
        f"fully_shard was applied to parts of the model, such as {inside[0]!r}, and not to the"
        " model itself, so nobody averages its other parameters; apply it to the model, too"
    )


def check_groups(modules: Sequence[Sequence[Group]]) -> list[Group]:
    """Return the groups of all modules that FSDP was applied to, each with one group.

    Raises
    ------
    InputError
        When a hook cannot average their gradients over replicas.
    """
    for of_one in modules:
        if len(of_one) > 1:
            raise InputError(
                "shard_placement_fn shards the parameters of one module over several meshes, for"
                " which FSDP has no hook; apply fully_shard to the parts of the module, each with"
                " its mesh"
            )
    groups = [group for of_one in modules for group in of_one]
    if not any(group.held for group in groups):
        raise InputError("the model has no parameters to train that FSDP shards")
    for group in groups:
        if group.ranks_that_replicate > 1:
            _refuse_replicas(group)
        if isinstance(group.hook, GroupHook) and not group.hook.hook.closed:
            raise InputError("the model is attached already; close() that handle first")
        if group.hook is not None and not isinstance(group.hook, GroupHook):
            raise InputError(
                f"the model has an all-reduce hook already ({group.hook!r}), and FSDP takes only"
                " one for each module; attach a model without it"
            )
    for held in (held for group in groups for held in group.held):
        if held.shard.is_meta:
            raise InputError(
                f"{held.name!r} is on the meta device; attach after model.to_empty(device=...), and"
                " after its parameters were initialised or loaded"
            )
    if any(group.has_divisor for group in groups):
        warn_on_rank_0(
            "set_gradient_divide_factor(f) divides the sums over shards, and sparcel averages over"
            " the replicas; for the gradients that HSDP has, give f / replicas"
        )
    return groups


def is_copied(parameter: DTensor, mesh: DeviceMesh) -> bool:
    """Tell whether several ranks of a mesh hold the same shard of a parameter."""
    own = parameter.device_mesh
    return own.size() < mesh.size() or any(
        isinstance(placement, Replicate) and own.size(dimension) > 1
        for dimension, placement in enumerate(parameter.placements)
    )


def checked_mesh(parameters: Mapping[str, DTensor]) -> DeviceMesh:
    """Return the mesh of the ranks that hold a replica of the model together.

    Under tensor parallelism that is one of two dimensions, and some parameters are on a part of it.

    Raises
    ------
    InputError
        When parameters are on ranks that are in no common mesh.
    """
    meshes = {parameter.device_mesh for parameter in parameters.values()}
    largest = max(meshes, key=lambda mesh: mesh.size())
    ranks = set(largest.mesh.flatten().tolist())
    if not all(ranks.issuperset(mesh.mesh.flatten().tolist()) for mesh in meshes):
        raise InputError(
            f"no mesh has all the ranks that hold the model, got {sorted(map(str, meshes))}; shard"
            " all parameters over one mesh, or over parts of one"
        )
    return largest


def _refuse_replicas(group: Group) -> None:
    """Refuse a group that FSDP averages densely over replicas by itself."""
    assert isinstance(group.module, nn.Module)
    if "replicate" in (_get_registry(group.module) or {}):
        raise InputError(
            f"replicate averages gradients densely over the {group.ranks_that_replicate} ranks of"
            " its mesh; give it a mesh of one rank, and the ranks to sparcel: mesh ="
            ' init_device_mesh(device, (ranks, 1), mesh_dim_names=("replicate", "alone"));'
            f' replicate(module, mesh=mesh["alone"]); {_ATTACH}'
        )
    raise InputError(
        "fully_shard over a mesh of two dimensions averages gradients densely over its"
        f" {group.ranks_that_replicate} replicas; shard over the other dimension alone, and let"
        f" sparcel average: {_SHARD}; {_ATTACH}"
    )
