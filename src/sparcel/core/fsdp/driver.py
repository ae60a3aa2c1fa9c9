"""What lets an averager exchange the gradients of a model that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from sparcel.core._checks import check_type
from sparcel.core.comm import Group
from sparcel.core.fsdp.ahead import AheadShards
from sparcel.core.fsdp.groups import MESH, SHARD, ParameterGroup, Parameters, groups_of, recover
from sparcel.core.fsdp.hook import GroupHook, Hook
from sparcel.core.training import Averager, Shard
from sparcel.core.training.driver import Unaveraged, check_group, model_name
from sparcel.errors import InputError

Replicas: TypeAlias = DeviceMesh | dist.ProcessGroup | None
"""The ranks that hold the same shard of a model: ``mesh["replicate"]``, or a process group."""


_WAS_LATE = "was no part of the model when it was attached"
_WAY_OUT = "apply fully_shard to it, close() the handle, attach again"


class FSDPDriver:
    """What an averager needs to know of a sharded model, and what starts it: a `Driver`.

    Raises
    ------
    InputError
        For a model that is not sharded from its root on, or over replicas too; for replicas that
        do not form a grid with the ranks that shard the model.
    """

    rows: Collection[str] = ()
    withhold_zeros: bool = False

    def __init__(self, model: object, replicate: Replicas, group: Group) -> None:
        self._model = root = _checked_root(model)
        recover(root)
        self._groups = groups_of(root)
        _check_hooks(self._groups)
        replicas = _checked_replicas(replicate)
        parameters = Parameters(held for group in self._groups for held in group.held)
        mesh = checked_mesh(parameters)
        columns = _checked_columns(replicas, mesh)
        ranks = sorted(rank for column in columns for rank in column)
        everyone = group_of_ranks(ranks, replicas, mesh.device_type) if group is None else group
        check_group(everyone, len(ranks))
        self.group: Group = everyone
        number = next(n for n, ranks in enumerate(columns) if dist.get_rank() in ranks)
        copied = frozenset(n for n, one in parameters.items() if _is_copied(one, mesh))
        self.shard: Shard | None = Shard(number, parameters, copied)
        self.tensors: Mapping[str, Tensor] = {
            name: whole.to_local().detach() for name, whole in parameters.items()
        }
        self.parameters: Mapping[str, Tensor] = parameters

    def move_ahead(self, averager: Averager, names: Collection[str]) -> AheadShards:
        """Let the model compute with moved values of these parameters."""
        held = (one for group in self._groups for one in group.held if one.name in names)
        ahead = averager.ahead(Parameters(held))
        return AheadShards(self._model, self._groups, ahead)

    def start(self, averager: Averager) -> None:
        """Let the averager exchange gradients from now on."""
        averager.on_close(Hook(self._model, self._groups, averager).close)
        known = self._known()
        ignored = {  # FSDP was told of these, too: ignored_params
            model_name(name)
            for name, parameter in self._model.named_parameters()
            if id(parameter) not in known
        }
        late = Unaveraged(self._model, self._known, ignored, _WAS_LATE, _WAY_OUT)
        averager.on_close(late.end)

    def _known(self) -> set[int]:
        """Return the ids of the parameters of all groups, as they are now."""
        return {id(one.parameter) for group in self._groups for one in (*group.held, *group.frozen)}


def is_sharded(model: object) -> bool:
    """Tell whether FSDP2 was applied to a model or to its parts, and not DDP to the whole."""
    return (
        isinstance(model, nn.Module)
        and not isinstance(model, DistributedDataParallel)
        and any(isinstance(module, FSDPModule) for module in model.modules())
    )


def _checked_root(model: object) -> nn.Module:
    """Return a model that FSDP was applied to as a whole, or raise an `InputError`."""
    if isinstance(model, FSDPModule) and isinstance(model, nn.Module):
        return model
    check_type(model, nn.Module, "model")
    assert isinstance(model, nn.Module)
    inside = [path for path, one in model.named_modules() if isinstance(one, FSDPModule)]
    if not inside:
        raise InputError(
            f"replicate= is for models of fully_shard, and the model is a {type(model).__name__};"
            f" {SHARD}; or leave replicate out for DistributedDataParallel"
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


def _check_hooks(groups: Iterable[ParameterGroup]) -> None:
    """Raise `InputError` if a group has a hook, of which FSDP takes only one."""
    for hook in (group.hook for group in groups):
        if isinstance(hook, GroupHook) and not hook.hook.closed:
            raise InputError("the model is attached already; close() that handle first")
        if hook is not None and not isinstance(hook, GroupHook):
            raise InputError(
                f"the model has an all-reduce hook already ({hook!r}), and FSDP takes only one for"
                " each module; attach a model without it"
            )


def _is_copied(parameter: DTensor, mesh: DeviceMesh) -> bool:
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


def _checked_replicas(replicate: object) -> dist.ProcessGroup:
    """Return the process group that ``replicate=`` means."""
    if isinstance(replicate, dist.ProcessGroup):
        return replicate
    if isinstance(replicate, DeviceMesh) and replicate.ndim == 1:
        return replicate.get_group()
    if replicate is None:
        raise InputError(
            "the model is sharded, so tell which ranks hold the same shards, for sparcel to average"
            f' over them: sparcel.attach(model, replicate=mesh["replicate"]), where {MESH}'
        )
    raise InputError(
        f'replicate must be a mesh of one dimension, such as mesh["replicate"], or a process group,'
        f" got {replicate!r}; {MESH}"
    )


def _checked_columns(replicas: dist.ProcessGroup, mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """Return the ranks of each shard, in order, by their numbers in the default group; all call.

    Parameters
    ----------
    replicas
        The ranks that hold this rank's shard.
    mesh
        The ranks that hold the model together with this rank.

    Raises
    ------
    InputError
        When they do not form a grid.
    """
    columns = [tuple(dist.get_process_group_ranks(replicas))]
    for dimension in range(mesh.ndim):
        found = _gathered(columns, mesh.get_group(dimension))
        columns = sorted({column for some in found for column in some})
    ranks = {rank for column in columns for rank in column}
    found = _gathered(columns, replicas)
    if len(ranks) != mesh.size() * replicas.size() or any(one != columns for one in found):
        raise InputError(
            f"the ranks of replicate, {dist.get_process_group_ranks(replicas)}, and those that"
            f" shard the model, {mesh.mesh.flatten().tolist()}, must form a grid; take both from"
            f" one mesh: {MESH}"
        )
    return columns


def group_of_ranks(ranks: list[int], like: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
    """Return the group of some ranks of the default group, in order; these ranks call.

    Its timeout is that of another group for a type of device.
    """
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD  # type: ignore[return-value]
    timeout = like._get_backend(torch.device(device)).options._timeout
    made: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timeout, use_local_synchronization=True, group_desc="sparcel"
    )
    return made


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found
