"""Outer steps on real processes: on a thread beside inner steps, and inside DDP and fully_shard."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.products.outer import Outer, attach, diloco, sparseloco, streaming
from tests.fsdp.models import mesh_of, whole
from tests.fsdp.nets import Net, loss_of, sharded
from tests.outer.islands import Named, same, train
from tests.outer.test_optimizers import KeepsCopies

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


class Compiled(nn.Module):
    """What torch.compile returns, whose import takes seconds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, x: Tensor) -> Any:
        return self._orig_mod(x)


def island_of_two(wrap: str) -> tuple[nn.Module, DeviceMesh]:
    """Return a model that two of four ranks train together, and the ranks that exchange it."""
    names = "islands", "replicate", "shard", "tp"
    sizes = {"ddp": (2, 2, 1, 1), "fsdp": (2, 1, 2, 1), "hsdp": (2, 2, 1, 1), "tp": (2, 1, 1, 2)}
    mesh = init_device_mesh("cpu", sizes[wrap], mesh_dim_names=names)
    if wrap == "ddp":
        group = mesh["replicate"].get_group()
        return Compiled(DistributedDataParallel(Net(), process_group=group)), mesh
    if wrap in ("fsdp", "hsdp"):
        return sharded(mesh["shard"] if wrap == "fsdp" else mesh["replicate", "shard"]), mesh
    model = Net(inner=64)
    for block in model.blocks:
        plan = {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["shard"]), mesh


def train_inside(comm: Communicator, wrap: str, method: str, poison: bool) -> Any:
    """Train two islands of two ranks; return what each has, and whether it exchanges."""
    model, mesh = island_of_two(wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = attach(model, optimizer, method, every=2, islands=mesh["islands"])
    island = comm.rank // 2
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, island if wrap == "tp" else comm.rank, step)
        (loss * torch.nan if poison and island and step == 3 else loss).backward()
        outer.count(6.0)
        optimizer.step()
    found = [whole(one) for one in model.parameters()]
    shared = [one.double().flatten() for one in outer.shared.values()]
    told = outer.steps, outer.islands, outer.optimizer.param_groups[0]["lr"]
    moments = [whole(optimizer.state[one]["exp_avg_sq"]) for one in model.parameters()]
    outer.close()
    return found, shared, told, isinstance(outer, Outer), moments


@pytest.mark.parametrize(
    ("wrap", "method", "poison"),
    [
        *product(["ddp", "fsdp", "hsdp", "tp"], ["default", "diloco"], [False]),
        *(("ddp", "default", True), ("fsdp", "diloco", True)),
        *(("hsdp", "diloco", True), ("tp", "default", True)),
    ],
)
@pytest.mark.parametrize("world_size", [4])
def test_islands_of_two_ranks(
    run_on: Callable[..., list[Any]], world_size: int, wrap: str, method: str, poison: bool
) -> None:
    results = run_on(world_size, train_inside, wrap, method, poison)
    for rank, (parameters, shared, told, exchanges, moments) in enumerate(results):
        assert told == (4, 2, 0.7 if method == "diloco" else 0.8)
        assert all(map(torch.equal, moments, results[rank - rank % 2][-1]))
        for one, other in zip(parameters, results[0][0], strict=True):
            assert bool(one.isfinite().all())
            assert torch.equal(one, other)
        if wrap in ("ddp", "hsdp"):  # each rank has all
            assert all(map(torch.equal, shared, parameters))
        assert exchanges == (wrap in ("fsdp", "tp") or rank % 2 == 0)


@pytest.mark.parametrize("world_size", [4])
def test_copies_and_shards_of_an_island_train_alike(
    run_on: Callable[..., list[Any]], world_size: int
) -> None:
    copies, shards = (
        run_on(world_size, train_inside, wrap, "diloco", False)[0][0] for wrap in ("ddp", "fsdp")
    )
    for one, other in zip(copies, shards, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def train_copies(comm: Communicator, wrap: str) -> list[Tensor]:
    """Train parameters of 16 bits whose optimiser keeps copies of 32."""
    model: nn.Module = nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    mesh = mesh_of(2, 2)
    if wrap == "ddp":
        model = DistributedDataParallel(model, process_group=mesh["shard"].get_group())
    else:
        fully_shard(model, mesh=mesh["shard"])
    inner = KeepsCopies(model.parameters(), lr=2.0**-12)  # less than 16 bits can move
    method = replace(diloco(), lr=1.0, momentum=0.0)
    outer = attach(model, inner, method, every=4, islands=mesh["replicate"])
    for _ in range(40):
        for one in model.parameters():
            one.grad = torch.full_like(one, 2.0 * (comm.rank // 2))  # 1 in the mean
        inner.step()
    outer.close()
    (parameter,) = model.parameters()
    return [whole(inner.state[parameter]["master"]), whole(parameter)]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("world_size", [4])
def test_copies_that_optimizers_keep_are_exchanged(
    run_on: Callable[..., list[Any]], world_size: int, wrap: str
) -> None:
    moved = torch.tensor(1.0 - 40 * 2.0**-12)
    for copied, parameter in run_on(world_size, train_copies, wrap):
        assert bool((copied == moved).all())
        assert bool((parameter == moved.bfloat16()).all())


class Half:
    """One rank of an island of two, which meets another island at a place."""

    def __init__(
        self, mesh: DeviceMesh, place: str, least: int, seed: int = 0, wrap: str = "fsdp"
    ) -> None:
        self.island, self.done = mesh.get_local_rank("replicate"), 0
        self.model: nn.Module
        if wrap == "fsdp":
            self.model = sharded(mesh["shard"])
        else:
            self.model = DistributedDataParallel(Net(), process_group=mesh["shard"].get_group())
        with torch.no_grad():
            for one in self.model.parameters():
                one.add_(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        outer = attach(self.model, self.optimizer, every=2, islands=place, least=least, patience=4)
        self.outer = outer

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, dist.get_rank(), self.done).backward()
        self.optimizer.step()
        self.done += 1

    def together(self, steps: int) -> Half:
        """Go on until two islands have done so many outer steps."""
        self.while_(lambda: self.outer.islands < 2)
        last = self.outer.steps + steps
        return self.while_(lambda: self.outer.steps < last)

    def while_(self, holds: Callable[[], bool]) -> Half:
        while holds():
            self.step()
            time.sleep(0.01)  # others wait, too, and need the cores
        return self

    def whole(self) -> list[Tensor]:
        return [whole(one) for one in self.model.parameters()]


def meet(comm: Communicator, place: str) -> Any:
    """Let an island join another one; restart both at another place, from their checkpoints."""
    mesh = mesh_of(2, 2)
    if comm.rank < 2:
        island = Half(mesh, place, 1)
        island.while_(lambda: island.outer.steps < 2)
    dist.barrier()
    if comm.rank >= 2:  # it begins with other parameters, which do not count
        island = Half(mesh, place, 1, seed=1)
    island.together(3)
    states = copy.deepcopy(
        [one.state_dict() for one in (island.model, island.optimizer, island.outer)]
    )
    assert isinstance(states[2]["shared.first.weight"], DTensor)
    for _ in range(4):
        island.step()
    steps, done, found = island.outer.steps, island.done - 4, island.whole()
    island.outer.close()
    again = Half(mesh, f"{place}-again", 2, seed=2)
    for one, state in zip((again.model, again.optimizer, again.outer), states, strict=True):
        one.load_state_dict(state)
    again.done = done
    for _ in range(4):
        again.step()
    assert again.outer.steps == steps
    resumed = again.whole()
    again.outer.close()
    return found, resumed


@pytest.mark.parametrize("world_size", [4])
def test_sharded_islands_join_and_return(
    run_on: Callable[..., list[Any]], world_size: int, tmp_path: Path
) -> None:
    results = run_on(world_size, meet, f"{tmp_path}/run")
    for found, resumed in results:
        for one, other, first in zip(found, resumed, results[0][0], strict=True):
            assert torch.equal(one, first)
            assert torch.equal(other, first)


def come_back(comm: Communicator, place: str, wrap: str) -> list[Tensor]:
    """Let an island come back from a checkpoint after the other one has gone on."""
    mesh = mesh_of(2, 2)
    island = Half(mesh, place, 2, wrap=wrap).together(2)
    states = copy.deepcopy(
        [one.state_dict() for one in (island.model, island.optimizer, island.outer)]
    )
    island.together(2)
    island.step()
    if comm.rank >= 2:
        island.outer.close()
        island = Half(mesh, place, 2, wrap=wrap)
        for one, state in zip((island.model, island.optimizer, island.outer), states, strict=True):
            one.load_state_dict(state)
        if isinstance(island.outer, Outer):  # the others have to wait for two steps, as due
            island.outer._islands.is_awaited = lambda: False
        island.step()
        found = island.whole()
        island.together(2)
    else:
        island.while_(lambda: island.outer.islands == 2).together(2)
        found = []
    ended = island.whole()
    island.outer.close()
    return [*ended, *found]


@pytest.mark.parametrize("wrap", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [4])
def test_all_ranks_of_an_island_come_back(
    run_on: Callable[..., list[Any]], world_size: int, wrap: str, tmp_path: Path
) -> None:
    first, second, third, fourth = run_on(world_size, come_back, f"{tmp_path}/run", wrap)
    assert all(map(torch.equal, third, fourth))  # also right after it has come back
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, third[: len(first)]))
