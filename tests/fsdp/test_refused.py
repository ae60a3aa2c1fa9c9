"""Models that attach refuses because it could not average all of their gradients once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.errors import CommunicationError, InputError
from tests.evenly import attach_evenly
from tests.fsdp.models import mesh_of
from tests.fsdp.nets import Net, loss_of, sharded
from tests.strategies import same_bits

pytestmark = pytest.mark.processes

Made = Callable[[Any], tuple[nn.Module, Any]]


def over_two_dimensions(mesh: Any) -> tuple[nn.Module, Any]:
    return fully_shard(Net(), mesh=mesh), mesh["replicate"]


def over_many(mesh: Any) -> tuple[nn.Module, Any]:
    return replicate(Net(), mesh=mesh["replicate"]), mesh["replicate"]


def without_replicas(mesh: Any) -> tuple[nn.Module, Any]:
    return fully_shard(Net(), mesh=mesh["shard"]), None


def parts_alone(mesh: Any) -> tuple[nn.Module, Any]:
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    return model, mesh["replicate"]


def compiled(mesh: Any) -> tuple[nn.Module, Any]:
    made: nn.Module = torch.compile(fully_shard(Net(), mesh=mesh["shard"]), backend="eager")
    return made, mesh["replicate"]


def ddp(mesh: Any) -> tuple[nn.Module, Any]:
    return DistributedDataParallel(Net()), mesh["replicate"]


def hooked(mesh: Any) -> tuple[nn.Module, Any]:
    model = fully_shard(Net(), mesh=mesh["shard"])
    model.set_all_reduce_hook(print)
    return model, mesh["replicate"]


def attached(mesh: Any) -> tuple[nn.Module, Any]:
    model = fully_shard(Net(), mesh=mesh["shard"])
    attach_evenly(model, "topk", replicate=mesh["replicate"])
    return model, mesh["replicate"]


def the_same_ranks(mesh: Any) -> tuple[nn.Module, Any]:
    return fully_shard(Net(), mesh=mesh["shard"]), mesh["shard"]


def something_else(mesh: Any) -> tuple[nn.Module, Any]:
    return fully_shard(Net(), mesh=mesh["shard"]), "replicate"


def frozen(mesh: Any) -> tuple[nn.Module, Any]:
    return fully_shard(Net().requires_grad_(False), mesh=mesh["shard"]), mesh["replicate"]


REFUSED: dict[str, tuple[Made, str]] = {
    "two dimensions": (
        over_two_dimensions,
        "averages gradients densely over its 2 replicas",
    ),
    "replicate over many": (over_many, 'replicate(module, mesh=mesh["alone"]); sparcel.attach('),
    "no replicas": (without_replicas, 'model, replicate=mesh["replicate"]), where mesh = init_de'),
    "parts alone": (parts_alone, "such as 'blocks.0', and not to the model itself"),
    "compiled": (compiled, "attach before that"),
    "DDP": (ddp, "the model is a DistributedDataParallel"),
    "a hook": (hooked, "the model has an all-reduce hook already (<built-in function print>)"),
    "attached": (attached, "attached already; close() that handle first"),
    "the same ranks twice": (the_same_ranks, "must form a grid; take both from one mesh"),
    "no mesh": (something_else, "replicate must be a mesh of one dimension"),
    "nothing to train": (frozen, "no parameters to train that FSDP shards"),
}
"""What was done to a model, and a part of the error."""


def refused(comm: Communicator) -> dict[str, str]:
    """Return what is said of each model."""
    said = {}
    for name, (make, _) in REFUSED.items():
        model, replicas = make(mesh_of(2, comm.size // 2))
        with pytest.raises(InputError) as raised:
            attach_evenly(model, "topk", replicate=replicas)  # type: ignore[arg-type]
        said[name] = str(raised.value)
    return said


def test_models_are_refused_with_the_right_way(run_on: Any) -> None:
    for said in run_on(4, refused):
        for name, (_, expected) in REFUSED.items():
            assert expected in said[name], name


def with_optimizer_in_backward(comm: Communicator) -> str:
    mesh = mesh_of(2, comm.size // 2)
    model = sharded(mesh["shard"])
    attach_evenly(model, "topk", replicate=mesh["replicate"])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: None)
    with pytest.raises(InputError) as raised:
        loss_of(model, comm.rank, 0).backward()
    return str(raised.value)


def test_optimisers_in_the_backward_pass_are_refused(run_on: Any) -> None:
    for said in run_on(4, with_optimizer_in_backward):
        assert "before the replicas are averaged; call the optimiser's step()" in said


def unfrozen(comm: Communicator) -> str:
    """Train parameters, a whole module and one between others, that were frozen before."""
    mesh = mesh_of(2, comm.size // 2)
    model = Net()
    for part in (model.blocks[1], model.blocks[0].inner[0]):
        part.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    said = []
    for part in (model.blocks[1], model.blocks[0].inner[0]):
        handle = attach_evenly(model, "topk", replicate=mesh["replicate"])
        loss_of(model, comm.rank, 0).backward()
        part.requires_grad_(True)
        with pytest.raises(InputError) as raised:
            loss_of(model, comm.rank, 1).backward()
        said.append(str(raised.value))
        model.reset_iter_state()
        handle.close()
    return " ".join(said)


def test_parameters_that_are_trained_later_are_refused(run_on: Any) -> None:
    for said in run_on(4, unfrozen):
        assert re.search(r"'blocks\.1\..*' was frozen .*'blocks\.0\.inner\.0\..*' was frozen", said)


def added(comm: Communicator) -> tuple[str, list[Tensor]]:
    """Train a layer that is added after a step; return what is said, and all shards at the end."""
    mesh = mesh_of(2, comm.size // 2)
    model = sharded(mesh["shard"])
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach_evenly(model, "topk", replicate=mesh["replicate"])
    for step in range(3):
        if step == 1:
            model.blocks.append(nn.Linear(36, 36))
            loss_of(model, comm.rank, step).backward()
            optimizer.add_param_group({"params": model.blocks[2].parameters()})
            with pytest.raises(InputError) as raised:
                optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups.pop()
            fully_shard(model.blocks[2], mesh=mesh["shard"])
            optimizer.add_param_group({"params": model.blocks[2].parameters()})
            state = handle.state_dict()
            handle.close()
            handle = attach_evenly(model, "topk", replicate=mesh["replicate"])
            handle.load_state_dict(state, strict=False)
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    return str(raised.value), [one.to_local().detach() for one in model.parameters()]


def test_a_layer_that_nobody_averages_is_not_trained(run_on: Any) -> None:
    told = run_on(4, added)
    assert all(said.startswith("'blocks.2.weight' was no part of the model") for said, _ in told)
    for (_, mine), (_, theirs) in zip(told[:2], told[2:], strict=True):
        assert all(map(same_bits, mine, theirs))


def after_closing(comm: Communicator) -> int:
    """Close a handle, train on in vain, and attach anew."""
    mesh = mesh_of(2, comm.size // 2)
    model = sharded(mesh["shard"])
    attach_evenly(model, "topk", replicate=mesh["replicate"]).close()
    with pytest.raises(CommunicationError, match="attach again to train on"):
        loss_of(model, comm.rank, 0).backward()
    model.reset_iter_state()  # type: ignore[attr-defined]
    handle = attach_evenly(model, "topk", replicate=mesh["replicate"])
    loss_of(model, comm.rank, 0).backward()
    handle.close()
    return handle.stats().steps


def test_a_model_can_be_attached_again(run_on: Any) -> None:
    assert run_on(4, after_closing) == [1] * 4
