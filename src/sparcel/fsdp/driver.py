"""What lets an averager exchange the gradients of a model that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from sparcel.comm import Group
from sparcel.fsdp.ahead import AheadShards
from sparcel.fsdp.groups import Parameters, groups_of, recover
from sparcel.fsdp.hook import Hook
from sparcel.fsdp.model import check_groups, checked_mesh, checked_root, is_copied
from sparcel.fsdp.ranks import Replicas, checked_columns, checked_replicas, group_of_all
from sparcel.training import Averager, Shard
from sparcel.training.following import watch_steps
from sparcel.training.names import model_name
from sparcel.training.unaveraged import Unaveraged

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
        self._model = root = checked_root(model)
        recover(root)
        self._groups = check_groups(groups_of(root))
        replicas = checked_replicas(replicate)
        parameters = Parameters(held for group in self._groups for held in group.held)
        mesh = checked_mesh(parameters)
        columns = checked_columns(replicas, mesh)
        self.group = group_of_all(columns, replicas, mesh.device_type, group)
        number = next(n for n, ranks in enumerate(columns) if dist.get_rank() in ranks)
        copied = frozenset(n for n, one in parameters.items() if is_copied(one, mesh))
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
        averager.on_close(watch_steps(late))

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
