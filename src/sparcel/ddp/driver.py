"""What lets an averager exchange the gradients of a DistributedDataParallel model."""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.comm import Group, size_of
from sparcel.ddp.ahead import AheadCalls
from sparcel.ddp.buckets import as_in_buckets
from sparcel.ddp.hook import Hook
from sparcel.ddp.model import checked_model
from sparcel.ddp.unaveraged import unaveraged
from sparcel.errors import InputError
from sparcel.training import Averager, Policy
from sparcel.training.following import watch_steps
from sparcel.training.names import model_name


class DDPDriver:
    """What an averager needs to know of a DDP model, and what starts it.

    Raises
    ------
    InputError
        For a model whose gradients do not all go through one hook; for a group of other ranks.
    """

    shard = None

    def __init__(self, model: object, group: Group) -> None:
        self._model = model = checked_model(model)
        self.group: Group = model.process_group if group is None else group
        _check_ranks(model, self.group)
        self.parameters = self.tensors = {
            model_name(name): parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        }
        self.rows = _parameters_with_rows(model.module)
        # DDP throws away the update of a parameter that no rank used, so none may be sent.
        self.withhold_zeros: bool = model.find_unused_parameters or model.static_graph

    def policy(self, policy: Policy) -> Policy:
        """Return the user's policy for the tensors that are averaged."""
        return policy

    def move_ahead(self, averager: Averager, names: Collection[str]) -> AheadCalls:
        """Let the model compute with moved values of these parameters."""
        movable = {name: self.parameters[name] for name in names}
        ahead = averager.ahead(movable, arrange=as_in_buckets(movable.values()))
        return AheadCalls(self._model.module, ahead)

    def start(self, averager: Averager) -> None:
        """Let the averager exchange gradients from now on."""
        self._model.register_comm_hook(None, Hook(self._model, averager).queue_bucket)
        averager.on_close(watch_steps(unaveraged(self._model, self.parameters)))


def _check_ranks(model: DistributedDataParallel, group: Group) -> None:
    ranks = dist.get_world_size(model.process_group)
    if (given := size_of(group)) != ranks:
        raise InputError(
            f"the model was wrapped for {ranks} ranks, group has {given}; pass the same process"
            " group to both, or none to sparcel"
        )


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
