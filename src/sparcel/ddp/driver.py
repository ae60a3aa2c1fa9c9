"""What lets an averager exchange the gradients of a DistributedDataParallel model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.comm import Group, size_of
from sparcel.ddp.ahead import AheadCalls
from sparcel.ddp.hook import Hook
from sparcel.ddp.model import checked_model
from sparcel.errors import InputError
from sparcel.training import Averager, Shard
from sparcel.training.ahead import Arrange
from sparcel.training.following import watch_steps
from sparcel.training.names import model_name
from sparcel.training.unaveraged import Unaveraged

_WAS_LATE = "was frozen when the model was wrapped, or was no part of it"
_WAY_OUT = "close() the handle, wrap the module in a new DistributedDataParallel, attach again"


class DDPDriver:
    """What an averager needs to know of a DDP model, and what starts it: a `Driver`.

    Raises
    ------
    InputError
        For a model whose gradients do not all go through one hook; for a group of other ranks.
    """

    shard: Shard | None = None

    def __init__(self, model: object, group: Group) -> None:
        self._model = model = checked_model(model)
        self.group: Group = model.process_group if group is None else group
        _check_ranks(model, self.group)
        self.parameters: Mapping[str, Tensor] = {
            model_name(name): parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        }
        self.tensors: Mapping[str, Tensor] = self.parameters
        self.rows: Collection[str] = _parameters_with_rows(model.module)
        # DDP throws away the update of a parameter that no rank used, so none may be sent.
        self.withhold_zeros: bool = model.find_unused_parameters or model.static_graph

    def move_ahead(self, averager: Averager, names: Collection[str]) -> AheadCalls:
        """Let the model compute with moved values of these parameters."""
        movable = {name: self.parameters[name] for name in names}
        ahead = averager.ahead(movable, arrange=_as_in_buckets(movable.values()))
        return AheadCalls(self._model.module, ahead)

    def start(self, averager: Averager) -> None:
        """Let the averager exchange gradients from now on."""
        self._model.register_comm_hook(None, Hook(self._model, averager).queue_bucket)
        # This list is for DDP's Python reducer alone, and would bring the hook into copies of the
        # model, whose own reducer never calls it.
        self._model._comm_hooks.clear()
        averaged = {id(parameter) for parameter in self.parameters.values()}
        ignored = {model_name(name) for name in self._model.parameters_to_ignore}
        late = Unaveraged(self._model.module, lambda: averaged, ignored, _WAS_LATE, _WAY_OUT)
        averager.on_close(watch_steps(late))


def _check_ranks(model: DistributedDataParallel, group: Group) -> None:
    ranks = dist.get_world_size(model.process_group)
    if (given := size_of(group)) != ranks:
        raise InputError(
            f"the model was wrapped for {ranks} ranks, group has {given}; pass the same process"
            " group to both, or none to sparcel"
        )


def _as_in_buckets(parameters: Iterable[Tensor]) -> Arrange:
    """Return how memory lies: as DDP lays gradients into buckets.

    DDP keeps the strides of a parameter whose elements fill a range of memory, in whatever order,
    and lays all others in rows. torch's ``empty_like`` has the same rule.
    """
    strides = {
        id(one): one.stride()
        for one in parameters
        if torch.empty_like(one, device="meta").stride() == one.stride()
    }

    def arrange(memory: Tensor, parameter: Tensor) -> Tensor:
        if id(parameter) in strides:
            return memory.as_strided(parameter.shape, strides[id(parameter)])
        return memory.view(parameter.shape)

    return arrange


def _parameters_with_rows(module: nn.Module) -> set[str]:
    """Return the names of the parameters whose gradients are sparse, by the rule that DDP has."""
    weights = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
    return {
        model_name(name)
        for name, parameter in module.named_parameters()
        if id(parameter) in weights
    }
