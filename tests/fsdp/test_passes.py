"""Steps of several passes, passes that leave out parts of a model, and gradients that were kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from sparcel.core.comm import Communicator
from sparcel.errors import CommunicationError, MismatchError
from tests.evenly import attach_evenly
from tests.fsdp.models import (
    Stack,
    Trained,
    assert_agreed,
    assert_conserved,
    gradients_of,
    mesh_of,
    shard,
    sums_of,
    train,
)

pytestmark = pytest.mark.processes


def without_sync(model: nn.Module, one: int, passes: int) -> None:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(one == passes - 1)
    model.set_is_last_backward(one == passes - 1)


def without_all_reduce(model: nn.Module, one: int, passes: int) -> None:
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(one == passes - 1)


PREPARED = {"no sync": without_sync, "no all-reduce": without_all_reduce}


def accumulated(comm: Communicator, name: str) -> Trained:
    return train(comm, 2, "topk", steps=2, passes=3, prepare=PREPARED[name], density=0.02)


@pytest.mark.parametrize("name", PREPARED)
def test_a_step_of_several_passes_exchanges_their_sum_once(run_on: Any, name: str) -> None:
    trained = run_on(4, accumulated, name)
    assert_agreed(trained)
    assert_conserved(trained, 2, sums_of(4, 2, 6))
    assert trained[0].stats.steps == 2


def left_out_at_last(comm: Communicator) -> tuple[dict[str, torch.Tensor], int]:
    """Leave a block out of the last pass, whose gradients of the pass before are waiting."""
    mesh = mesh_of(2, 2)
    model = shard(Stack(), mesh["shard"])
    handle = attach_evenly(model, "dense", replicate=mesh["replicate"])
    without_all_reduce(model, 0, 2)
    model(comm.rank, 0).backward()
    without_all_reduce(model, 1, 2)
    model(comm.rank, 1, [0]).backward()
    handle.close()
    return gradients_of(model), handle.stats().steps


def test_what_the_last_pass_left_out_is_exchanged_too(run_on: Any) -> None:
    expected = {name: part / 2 for name, part in sums_of(4, 2, 2).items()}
    first = {name: part / 2 for name, part in sums_of(4, 2, 1).items()}
    for found, steps in run_on(4, left_out_at_last):
        assert steps == 1
        for name, gradient in found.items():
            sought = first if name.startswith("blocks.0") else expected
            assert torch.equal(gradient, sought[name]), name


def kept(comm: Communicator) -> dict[str, torch.Tensor]:
    """Do two steps without zero_grad() between them."""
    mesh = mesh_of(2, 2)
    model = shard(Stack(), mesh["shard"])
    handle = attach_evenly(model, "dense", replicate=mesh["replicate"])
    model(comm.rank, 0).backward()
    first = {name: p.grad for name, p in model.named_parameters()}
    model(comm.rank, 1).backward()
    handle.close()
    assert all(p.grad is first[name] for name, p in model.named_parameters())
    return gradients_of(model)


def test_gradients_of_steps_before_are_added_to(run_on: Any) -> None:
    expected = sums_of(4, 2, 2)
    for found in run_on(4, kept):
        for name, gradient in found.items():
            assert torch.equal(2 * gradient, expected[name]), name


def started_anew(comm: Communicator) -> dict[str, torch.Tensor]:
    """Call zero_grad() between the passes of a step, after a step whose gradients were kept."""
    mesh = mesh_of(2, 2)
    model = shard(Stack(), mesh["shard"])
    handle = attach_evenly(model, "dense", replicate=mesh["replicate"])
    model(comm.rank, 0).backward()
    without_all_reduce(model, 0, 2)
    model(comm.rank, 0).backward()
    model.zero_grad()
    without_all_reduce(model, 1, 2)
    model(comm.rank, 0).backward()
    handle.close()
    return gradients_of(model)


def test_zero_grad_between_passes_forgets_what_was_kept(run_on: Any) -> None:
    expected = sums_of(4, 2, 1)
    for found in run_on(4, started_anew):
        for name, gradient in found.items():
            assert torch.equal(2 * gradient, expected[name]), name


def interrupted(comm: Communicator) -> tuple[str, str, bool]:
    """Raise on all ranks in a backward pass, go on, and then attach anew."""
    mesh = mesh_of(2, 2)
    model = shard(Stack(), mesh["shard"])
    handle = attach_evenly(model, "topk", replicate=mesh["replicate"])
    model(comm.rank, 0).backward()
    before, said = handle.state_dict(), list[str]()

    def fail(gradient: torch.Tensor) -> None:
        raise LookupError("a user's mistake")

    first = model.blocks[0]  # the last one in the backward pass
    stop = first.register_forward_hook(lambda *parts: parts[-1].register_hook(fail) and None)
    for _ in range(2):
        with pytest.raises((LookupError, CommunicationError)) as raised:
            model(comm.rank, 1).backward()
        said.append(f"{type(raised.value).__name__}: {raised.value}")
        stop.remove()
        model.reset_iter_state()
    handle.close()
    again = attach_evenly(model, "topk", replicate=mesh["replicate"])
    again.load_state_dict(before)
    model.zero_grad()
    model(comm.rank, 1).backward()
    again.close()
    return said[0], said[1], again.stats().training_steps == 2


def test_a_pass_after_one_that_an_error_ended_is_refused(run_on: Any) -> None:
    for first, second, went_on in run_on(4, interrupted):
        assert first == "LookupError: a user's mistake"
        assert second.startswith("CommunicationError: the backward pass before was ended by an")
        assert went_on


class Checkpointed(nn.Module):
    """Calls its blocks, each sharded by itself, in reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(40, 40) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def under_checkpoints(comm: Communicator) -> tuple[int, list[bool]]:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = shard(Checkpointed(), mesh["shard"])
    handle = attach_evenly(model, "topk", density=0.02, replicate=mesh["replicate"])
    for step in range(2):
        x = torch.full((3, 40), comm.rank + step + 1.0, requires_grad=True)
        model(x).square().sum().backward()
    handle.close()
    return handle.stats().steps, [one.any().item() for one in gradients_of(model).values()]


def test_passes_inside_of_a_backward_pass_are_a_part_of_its_step(run_on: Any) -> None:
    for steps, have_gradients in run_on(4, under_checkpoints):
        assert steps == 2
        assert all(have_gradients)


def skipping(comm: Communicator, skipped: dict[int, list[int]]) -> Trained | str:
    try:
        return train(comm, 2, "topk", unused=skipped, density=0.02)
    except CommunicationError as error:
        return f"{type(error).__name__}: {error}"


def test_a_block_that_nobody_uses_is_left_out(run_on: Any) -> None:
    trained = run_on(4, skipping, {0: [1], 1: [1]})
    assert_agreed(trained)
    expected = sums_of(4, 2, 4)
    assert not any(name.startswith("blocks.1") for name in trained[0].updates)
    used = {name: part for name, part in expected.items() if not name.startswith("blocks.1")}
    assert_conserved(trained, 2, used)


@pytest.mark.parametrize("second", [[0], []], ids=["another of the same size", "one more"])
def test_replicas_that_use_different_blocks_are_told(run_on: Any, second: list[int]) -> None:
    with pytest.raises(MismatchError, match=r"blocks\.[01]\.large and"):
        run_on(4, partial(train, replicas=2, scheme="topk", unused={0: [1], 1: second}))
