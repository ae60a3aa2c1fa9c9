"""Which ranks hold the same shard, and which of them hold the model together."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparcel.comm import Group, size_of
from sparcel.errors import InputError

Replicas: TypeAlias = DeviceMesh | dist.ProcessGroup | None
"""The ranks that hold the same shard of a model: ``mesh["replicate"]``, or a process group."""

MESH = 'mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))'


def checked_replicas(replicate: object) -> dist.ProcessGroup:
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


def checked_columns(replicas: dist.ProcessGroup, mesh: DeviceMesh) -> list[tuple[int, ...]]:
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


def group_of_all(
    columns: list[tuple[int, ...]], replicas: dist.ProcessGroup, device: str, group: Group
) -> Group:
    """Return the group of all these ranks; ``group`` if it is given.

    ``device`` is the type of device that the model is on.
    """
    ranks = sorted(rank for column in columns for rank in column)
    if group is not None:
        if (given := size_of(group)) != len(ranks):
            raise InputError(
                f"the model is on {len(ranks)} ranks, group has {given}; give the group of all of"
                " them, or none"
            )
        return group
    return group_of_ranks(ranks, replicas, device)


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
