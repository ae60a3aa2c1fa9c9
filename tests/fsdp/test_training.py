"""Sharded models, averaged over replicas: nothing is lost, and all replicas agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from sparcel.core.comm import Communicator
from sparcel.core.schemes import Hierarchical, TopK
from tests.ddp.models import known_gradient
from tests.evenly import attach_evenly
from tests.fsdp.models import (
    Trained,
    assert_agreed,
    assert_conserved,
    mesh_of,
    sums_of,
    train,
)

pytestmark = pytest.mark.processes

METHODS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gtopk, four replicas": (4, "gtopk", {"density": 0.02}),
    "scalecom": (2, "scalecom", {"density": 0.02}),
    "topk over the model": (2, "topk", {"density": 0.02, "scope": "model"}),
    "densities": (2, "topk", {"densities": {"blocks.*.single": 0.1, "scale": 1}}),
    "dense": (2, "dense", {}),
    "one replica": (1, "topk", {"density": 0.02}),
}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_lost_and_replicas_agree(run_on: Any, name: str) -> None:
    replicas = METHODS[name][0]
    trained = run_on(4, train_by, name)
    assert_agreed(trained)
    assert_conserved(trained, replicas, sums_of(4, replicas, 4))
    assert trained[0].stats.steps == 4
    if name != "dense":
        assert any(memory.any() for memory in trained[0].memory.values())


def train_by(comm: Communicator, name: str) -> Trained:
    replicas, scheme, settings = METHODS[name]
    return train(comm, replicas, scheme, **settings)


class Evenly(nn.Module):
    """Two parameters that two ranks cut in halves; their gradients are known integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(64, 30))
        self.second = nn.Parameter(torch.zeros(20, 51))

    def forward(self, rank: int, step: int) -> Tensor:
        parts = [(p * known_gradient(n, p, rank, step)).sum() for n, p in self.named_parameters()]
        return torch.stack(parts).sum()


def beside_hitopk(comm: Communicator, replicas: int) -> int:
    """Count the steps in which updates and memory are those of hitopk on the same regions.

    FSDP averages over shards where hitopk sums, so its memory is that of hitopk divided.
    """
    shards = comm.size // replicas
    mesh = mesh_of(replicas, shards)
    model = fully_shard(Evenly(), mesh=mesh["shard"])
    keep = {"density": 0.03, "policy": lambda *_: False}
    handle = attach_evenly(model, "topk", replicate=mesh["replicate"], **keep)
    hitopk = Hierarchical(TopK(0.03), ranks_per_node=shards)

    def by_shard(of: dict[str, Tensor]) -> Tensor:
        parts = [whole.chunk(shards) for whole in of.values()]
        return torch.cat([part.flatten() for one in zip(*parts, strict=True) for part in one])

    plain, same = Evenly(), 0
    for step in range(5):
        model.zero_grad()
        model(comm.rank, step).backward()
        updates = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        known = {n: known_gradient(n, p, comm.rank, step) for n, p in plain.named_parameters()}
        expected = hitopk.step(by_shard(known), comm)
        mine = mesh["replicate"].get_local_rank()
        state = handle.state_dict()
        memory = {n: state[f"rank{mine}.{n}"].full_tensor() for n in known}
        start, stop = hitopk._shard
        theirs = hitopk.memory[start:stop] / shards
        ours = by_shard(memory)[start:stop]
        assert theirs.any()
        same += torch.equal(by_shard(updates), expected) and torch.equal(ours, theirs)
    handle.close()
    return same


@pytest.mark.parametrize("replicas", [2, 4])
def test_shards_get_the_bits_of_hitopk(run_on: Any, replicas: int) -> None:
    assert run_on(4, beside_hitopk, replicas) == [5] * 4
