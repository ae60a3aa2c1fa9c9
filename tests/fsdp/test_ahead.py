"""Step-ahead in sharded models: gradients are those at the moved values, and nothing is moved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.func import functional_call

from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from tests.evenly import attach_evenly
from tests.fsdp.models import memory_of, mesh_of
from tests.fsdp.nets import Net, loss_of, sharded

pytestmark = pytest.mark.processes

LR, MOMENTUM = 0.3, 0.5


def nothing(model: nn.Module, before: bool) -> None:
    """Do a forward pass, and a backward pass."""


def evaluate(model: nn.Module, before: bool) -> None:
    """Look at the model between the two passes, in the ways in which people do it."""
    if before:
        return
    with torch.no_grad():
        loss_of(model, 0, 9)
    model.eval()
    loss_of(model, 0, 9)
    model.train()


def gather_first(model: nn.Module, before: bool) -> None:
    """Gather the parameters of a block before the pass, as prefetching does."""
    if before:
        block = model.blocks[0]
        assert isinstance(block, FSDPModule)
        block.unshard(async_op=True)


def gather_between(model: nn.Module, before: bool) -> None:
    """Gather the parameters of a block for the backward pass."""
    if not before:
        gather_first(model, True)


def forget(model: nn.Module, before: bool) -> None:
    """Do a forward pass without a backward pass, and look at the model."""
    if before:
        loss_of(model, 0, 9)
        evaluate(model, False)


Between = Callable[[nn.Module, bool], None]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Between]] = {
    "plain": ({}, {}, nothing),
    "whole after the forward pass": ({"reshard_after_forward": False}, {}, nothing),
    "checkpoint": ({}, {"reentrant": False}, nothing),
    "reentrant checkpoint": ({}, {"reentrant": True}, nothing),
    "evaluation in between": ({}, {}, evaluate),
    "evaluation, whole after passes": ({"reshard_after_forward": False}, {}, evaluate),
    "gathered in between": ({}, {}, gather_between),
    "gathered beforehand": ({}, {}, gather_first),
    "a pass without a backward pass": ({}, {}, forget),
}


def gradients(comm: Communicator, name: str) -> tuple[float, float, bool, bool]:
    """Compare gradients with those of a plain model at moved values; see the test."""
    settings, net, between = CASES[name]
    mesh = mesh_of(1, comm.size)
    model = sharded(mesh["shard"], settings=settings, **net)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    handle = attach_evenly(
        model, "topk", density=0.05, replicate=mesh["replicate"], optimizer=optimizer
    )
    for step in range(2):
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    memory, values = memory_of(handle), whole(model)
    copied = copy.deepcopy(optimizer).param_groups[0]["params"]
    for one, parameter in zip(copied, model.parameters(), strict=True):
        assert torch.equal(one.to_local(), parameter.to_local())
    between(model, True)
    loss = loss_of(model, comm.rank, 2)
    between(model, False)
    loss.backward()
    stayed = all(torch.equal(one, values[key]) for key, one in whole(model).items())
    # One replica: the update is what left the memory, and the gradient what entered it.
    left, now = {k: p.grad.full_tensor() for k, p in model.named_parameters()}, memory_of(handle)
    entered = {k: left[k].double().flatten() + now[k] - memory[k] for k in memory}
    plain = Net()
    still = dict(values)
    unmoved = "blocks.0." if between is gather_first else "nothing"
    for key, owed in memory.items():
        if not key.startswith(unmoved):
            way = (1 + MOMENTUM) * LR * owed.float().view(values[key].shape)
            values[key] = values[key] - way
    at_moved, at_rest = (gradient_at(plain, one, comm.size, 2) for one in (values, still))
    off = max((entered[k] - at_moved[k]).abs().max().item() for k in memory)
    away = max((at_rest[k] - at_moved[k]).abs().max().item() for k in memory)
    model.eval()
    with torch.no_grad():
        same = torch.allclose(loss_of(model, 0, 3), at(plain, still, 0, 3), atol=1e-6)
    handle.close()
    return off, away, stayed, same


def whole(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {key: one.full_tensor().clone() for key, one in state.items()}


def at(plain: Net, values: dict[str, Tensor], rank: int, step: int) -> Tensor:
    call = nn.Module()
    call.forward = lambda x: functional_call(plain, values, (x,))  # type: ignore[method-assign]
    return loss_of(call, rank, step)


def gradient_at(plain: Net, values: dict[str, Tensor], ranks: int, step: int) -> dict[str, Tensor]:
    leaves = {key: one.detach().requires_grad_() for key, one in values.items()}
    torch.stack([at(plain, leaves, rank, step) for rank in range(ranks)]).mean().backward()
    return {key: one.grad.double().flatten() for key, one in leaves.items()}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_at_the_moved_values(run_on: Any, name: str) -> None:
    for off, away, stayed, same in run_on(2, gradients, name):
        assert off < 1e-6
        assert away > 1e-4  # it would be seen
        assert stayed
        assert same


def interrupted(comm: Communicator, part: str, error: type[BaseException]) -> bool:
    """Let the call of a part fail, and tell whether an evaluation is one of the parameters."""
    mesh = mesh_of(1, comm.size)
    model = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), LR)
    handle = attach_evenly(model, "topk", density=0.05, replicate=mesh["replicate"])
    for step in range(2):
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    def fail(*_: object) -> None:
        raise error

    hook = model.blocks[1].inner.register_forward_hook(fail)
    with pytest.raises(error):
        model.get_submodule(part)(torch.ones(1, 36))
    hook.remove()
    model.eval()
    with torch.no_grad():
        result = loss_of(model, 0, 3), at(Net(), whole(model), 0, 3)
    handle.close()
    return torch.allclose(*result, atol=1e-6)


@pytest.mark.parametrize(("part", "error"), [("", KeyboardInterrupt), ("blocks.1", LookupError)])
def test_an_interrupted_pass_leaves_no_moved_values(
    run_on: Any, part: str, error: type[BaseException]
) -> None:
    assert run_on(2, interrupted, part, error) == [True] * 2


def kept_by_few(comm: Communicator) -> str:
    mesh = mesh_of(1, comm.size)
    model = sharded(mesh["shard"], settings={"reshard_after_forward": 2})
    with pytest.raises(InputError) as raised:
        attach_evenly(model, "topk", replicate=mesh["replicate"])
    return str(raised.value)


def test_parameters_that_few_ranks_keep_are_refused(run_on: Any) -> None:
    for said in run_on(4, kept_by_few):
        assert "reshard_after_forward gives a number of ranks" in said


def after_a_step(comm: Communicator) -> str:
    """Do two forward passes, and then two backward passes that are a step each."""
    mesh = mesh_of(1, comm.size)
    model = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), LR)
    attach_evenly(model, "topk", replicate=mesh["replicate"], optimizer=optimizer)
    loss_of(model, comm.rank, 0).backward()
    first, second = loss_of(model, comm.rank, 1), loss_of(model, comm.rank, 2)
    first.backward()
    with pytest.raises(InputError) as raised:
        second.backward()
    return str(raised.value)


def test_a_step_between_a_forward_and_its_backward_pass_is_refused(run_on: Any) -> None:
    for said in run_on(2, after_a_step):
        assert "a step came between a forward and its backward pass" in said


def with_another_gather(comm: Communicator) -> str:
    mesh = mesh_of(1, comm.size)
    model = sharded(mesh["shard"])
    model.first.weight._local_tensor.fsdp_pre_all_gather = print
    with pytest.raises(InputError) as raised:
        attach_evenly(model, "topk", replicate=mesh["replicate"])
    attach_evenly(model, "topk", replicate=mesh["replicate"], ahead=False).close()
    return str(raised.value)


def test_an_all_gather_of_somebody_else_is_left_alone(run_on: Any) -> None:
    for said in run_on(2, with_another_gather):
        assert said.startswith("'first.weight' has an all-gather of its own")


def replaced(comm: Communicator) -> float:
    """Replace all parameters after attach, and return the largest output in training."""
    mesh = mesh_of(1, comm.size)
    model = sharded(mesh["shard"])
    handle = attach_evenly(model, "topk", replicate=mesh["replicate"])
    zeros = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
    model.load_state_dict(zeros, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    largest = model(torch.ones(2, 36)).abs().max().item()
    for step in range(2):
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    return float(largest)


def test_parameters_that_are_replaced_are_those_that_move(run_on: Any) -> None:
    assert run_on(2, replaced) == [0.0, 0.0]


def graphs_grow(comm: Communicator) -> bool:
    """Tell whether what is gathered of shards of one rank has a graph."""
    mesh = mesh_of(comm.size, 1)
    model = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), LR)
    handle = attach_evenly(model, "topk", replicate=mesh["replicate"], optimizer=optimizer)
    for step in range(2):
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
    handle.close()
    (group,) = model.blocks[0]._get_fsdp_state()._fsdp_param_groups
    return any(out.requires_grad for one in group.fsdp_params for out in one.all_gather_outputs)


def test_moved_values_carry_no_graph(run_on: Any) -> None:
    assert run_on(2, graphs_grow) == [False, False]


def computed_in(comm: Communicator) -> set[torch.dtype]:
    """Return in what dtype a module finds its weight, where passes compute in bfloat16."""
    mesh = mesh_of(1, comm.size)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mesh["shard"], settings={"mp_policy": policy})
    seen: set[torch.dtype] = set()
    model.first.register_forward_pre_hook(lambda layer, _: seen.add(layer.weight.dtype))
    handle = attach_evenly(model, "topk", replicate=mesh["replicate"])
    for step in range(2):
        loss_of(model, comm.rank, step).backward()
    handle.close()
    return seen


def test_moved_values_have_the_dtype_that_passes_compute_in(run_on: Any) -> None:
    assert run_on(2, computed_in) == [{torch.bfloat16}] * 2
