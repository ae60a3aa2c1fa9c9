"""Outer steps on real processes: on a thread beside inner steps, and inside DDP and fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparcel import simulate
from sparcel.comm import Communicator
from sparcel.outer import Outer, attach, sparseloco, streaming
from tests.fsdp.models import mesh_of, whole
from tests.fsdp.nets import Net, loss_of, sharded
from tests.outer.islands import Named, same, train

pytestmark = pytest.mark.processes

METHODS: dict[str, Any] = {
    "default": lambda: None,
    "streaming": lambda: streaming(2, 1),
    "sparseloco, by senders": lambda: sparseloco(divisor="sent"),
}


def train_on_default_group(comm: Communicator, name: str) -> tuple[Named, Named]:
    return train(comm, METHODS[name](), 12, every=4)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_do_what_the_simulated_cluster_does(
    run_on: Callable[..., list[Any]], world_size: int, name: str
) -> None:
    expected = simulate(world_size, lambda comm: train_on_default_group(comm, name)).results
    for found, there in zip(
        run_on(world_size, train_on_default_group, name), expected, strict=True
    ):
        assert same(found[0], there[0])
        assert same(found[1], there[1])


def train_inside(comm: Communicator, wrap: str, method: str, poison: bool) -> Any:
    """Train two islands of two ranks; return what each has, and whether it exchanges."""
    mesh = mesh_of(2, 2)
    model: nn.Module
    if wrap == "ddp":
        model = DistributedDataParallel(Net(), process_group=mesh["shard"].get_group())
    else:
        model = sharded(mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = attach(model, optimizer, method, every=2, islands=mesh["replicate"])
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, comm.rank, step)
        (loss * torch.nan if poison and comm.rank >= 2 and step == 3 else loss).backward()
        optimizer.step()
    found = [whole(one) for one in model.parameters()]
    steps = outer.steps
    outer.close()
    return found, steps, isinstance(outer, Outer)


@pytest.mark.parametrize("poison", [False, True], ids=["", "poison"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", ["default", "diloco"])
@pytest.mark.parametrize("world_size", [4])
def test_islands_of_two_ranks(
    run_on: Callable[..., list[Any]], world_size: int, wrap: str, method: str, poison: bool
) -> None:
    results = run_on(world_size, train_inside, wrap, method, poison)
    for parameters, steps, _ in results:
        assert steps == 4
        for one, other in zip(parameters, results[0][0], strict=True):
            assert bool(one.isfinite().all())
            assert torch.equal(one, other)
    exchanging = [True, False] * 2 if wrap == "ddp" else [True] * 4
    assert [exchanges for _, _, exchanges in results] == exchanging


@pytest.mark.parametrize("world_size", [4])
def test_copies_and_shards_of_an_island_train_alike(
    run_on: Callable[..., list[Any]], world_size: int
) -> None:
    copies, shards = (
        run_on(world_size, train_inside, wrap, "diloco", False)[0][0] for wrap in ("ddp", "fsdp")
    )
    for one, other in zip(copies, shards, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
