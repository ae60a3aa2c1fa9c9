"""A step takes effect on the ranks of all shards, or on none."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparcel.core.comm import Communicator
from sparcel.errors import CommunicationError
from tests.evenly import attach_evenly
from tests.fsdp.models import Stack, gradients_of, memory_of, mesh_of, shard
from tests.fsdp.nets import loss_of, sharded
from tests.strategies import same_bits
from tests.workers import run_apart

pytestmark = pytest.mark.processes

OF_ONE_SHARD = "blocks.0.other"
"""Its last element is in the last shard."""


def poisoned(comm: Communicator, rank: int, value: float, scope: str) -> tuple[bool, ...]:
    """Do a step, a void one, and another one."""
    mesh = mesh_of(2, 2)
    model = shard(Stack(), mesh["shard"])
    settings = {"density": 0.02, "scope": scope}
    handle = attach_evenly(model, "topk", replicate=mesh["replicate"], **settings)
    model(comm.rank, 0).backward()
    before = memory_of(handle)
    model.zero_grad()
    model(comm.rank, 1, poison=(OF_ONE_SHARD, value if comm.rank == rank else 0.0)).backward()
    void = all(gradient.isnan().all() for gradient in gradients_of(model).values())
    after = memory_of(handle)
    kept = all(torch.equal(before[name], after[name]) for name in before)
    model.zero_grad()
    model(comm.rank, 2).backward()
    goes_on = all(gradient.isfinite().all() for gradient in gradients_of(model).values())
    stats = handle.stats()
    handle.close()
    return void, kept, goes_on, stats.void_steps == 1, any(one.any() for one in before.values())


@pytest.mark.parametrize(
    ("rank", "value", "scope"), [(0, math.nan, "bucket"), (3, math.inf, "model")]
)
def test_what_one_shard_cannot_take_voids_the_step_of_all(
    run_on: Any, rank: int, value: float, scope: str
) -> None:
    assert run_on(4, poisoned, rank, value, scope) == [(True,) * 5] * 4


def broken(comm: Communicator) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Kill rank 1 while others of its replicas have gradients already."""
    mesh = mesh_of(2, 2)
    model = shard(Stack(), mesh["shard"])
    handle = attach_evenly(model, "topk", replicate=mesh["replicate"], density=0.02)
    model(comm.rank, 0).backward()
    before = local_memory(handle)
    handle._session.ranks.comm.submit(lambda: killed() if comm.rank == 1 else None)
    said = ""
    try:
        model(comm.rank, 1).backward()
    except (CommunicationError, RuntimeError) as error:
        said = type(error).__name__
    return said, before, local_memory(handle)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def local_memory(handle: Any) -> dict[str, Tensor]:
    state = handle.state_dict().items()
    return {key: part.to_local().clone() for key, part in state if key.startswith("rank")}


@pytest.mark.slow
def test_survivors_of_all_shards_raise_and_keep_their_memory() -> None:
    outcomes = run_apart(4, broken, timeout=20)
    assert outcomes.pop(1).died == -signal.SIGKILL
    for outcome in outcomes:
        said, before, after = outcome.result
        assert said in ("CommunicationError", "RuntimeError")
        assert any(part.any() for part in before.values())
        assert all(torch.equal(before[key], after[key]) for key in before)


def fail(*_: object) -> None:
    raise LookupError


def fail_when_its_gradient_is_there(module: nn.Module, inputs: object, output: Tensor) -> None:
    output.register_hook(fail)


FAILURES: dict[str, Callable[[nn.Module], Any]] = {
    "before any exchange": lambda m: m.register_forward_hook(fail_when_its_gradient_is_there),
    "after an exchange": lambda m: m.blocks[0].register_forward_hook(
        fail_when_its_gradient_is_there
    ),
    "in the forward pass": lambda m: m.blocks[1].register_forward_hook(fail),
}


def goes_on(comm: Communicator, failure: str, fails: bool) -> tuple[str, list[Tensor]]:
    """Train with a new handle after the second step, which may fail.

    Returns what the pass after a failed one says, and this rank's shards at the end.
    """
    mesh, said = mesh_of(2, 2), ""
    model = sharded(mesh["shard"])
    attach = partial(attach_evenly, model, "topk", density=0.05, replicate=mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = attach()
    for step in range(4):
        if step == 2:
            if fails:
                hook = FAILURES[failure](model)
                with pytest.raises(LookupError):
                    loss_of(model, comm.rank, 9).backward()
                hook.remove()
                optimizer.zero_grad()
                try:
                    loss_of(model, comm.rank, 9)
                except CommunicationError as error:
                    said = str(error)
            state = handle.state_dict()
            handle.close()
            handle = attach()
            handle.load_state_dict(state)
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    return said, [one.to_local().detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("failure", FAILURES)
def test_training_goes_on_after_an_exception_as_if_the_pass_had_not_been(
    run_on: Any, failure: str
) -> None:
    with_failure = run_on(4, goes_on, failure, True)
    without = run_on(4, goes_on, failure, False)
    for (said, mine), (_, plain) in zip(with_failure, without, strict=True):
        assert ("ended by an error" in said) == ("exchange" in failure)
        assert all(map(same_bits, mine, plain))
    replicas = with_failure[:2], with_failure[2:]
    assert all(all(map(same_bits, a, b)) for (_, a), (_, b) in zip(*replicas, strict=True))
