"""Sharded models with known gradients, and what a training of them has done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import sparcel
from sparcel.core.comm import Communicator
from tests.ddp.models import Poison, known_gradient
from tests.evenly import attach_evenly

SHAPES = {"large": (33, 40), "bias": (33,), "other": (50, 64), "single": (1, 1500)}
"""Tensors of a block. Two ranks cut two of them unevenly, one of them has none of ``single``."""

Apply = Callable[[nn.Module, DeviceMesh], Any]


class Block(nn.Module):
    """Computes the sum of <parameter, coefficients>, so its gradients are the coefficients."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for key, shape in SHAPES.items():
            self.register_parameter(key, nn.Parameter(torch.zeros(shape)))

    def forward(self, before: Tensor, rank: int, step: int, poison: Poison | None) -> Tensor:
        total = before
        for key, parameter in self.named_parameters():
            name = f"{self.name}.{key}"
            coefficients = known_gradient(name, parameter, rank, step)
            if poison is not None and poison[0] == name:
                coefficients.view(-1)[-1] = poison[1]
            total = total + (parameter.float() * coefficients).sum()
        return total


class Stack(nn.Module):
    """Blocks one after another; some of them may be left out."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(f"blocks.{n}") for n in range(blocks)])
        self.scale = nn.Parameter(torch.ones(40, 40))

    def forward(
        self, rank: int, step: int, unused: Collection[int] = (), poison: Poison | None = None
    ) -> Tensor:
        total = (self.scale * known_gradient("scale", self.scale, rank, step)).sum()
        for number, block in enumerate(self.blocks):
            if number not in unused:
                total = block(total, rank, step, poison)
        return total


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> nn.Module:
    """Apply fully_shard to the blocks of a model, and to the model."""
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor that may be sharded, in float64; all ranks that hold it call."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().double().flatten().clone()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def memory_of(handle: sparcel.Handle) -> dict[str, Tensor]:
    """Return what this rank's replica has in memory, by name."""
    found = {}
    for key, part in handle.state_dict().items():
        kind, _, name = key.partition(".")
        if kind.startswith("rank"):
            found[name] = whole(part)
    return found


@dataclass
class Trained:
    """The sum of a replica's ``updates`` and its ``memory``, by name."""

    updates: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    stats: Any = None


def train(
    comm: Communicator,
    replicas: int,
    scheme: str,
    steps: int = 4,
    shard_by: Apply = shard,
    passes: int = 1,
    prepare: Callable[[nn.Module, int, int], None] | None = None,
    unused: Mapping[int, Collection[int]] | None = None,
    **settings: Any,
) -> Trained:
    """Train `Stack` for some steps of several passes; ``prepare(model, pass, passes)`` each pass.

    ``unused`` says for each replica which blocks its passes leave out.
    """
    mesh = mesh_of(replicas, comm.size // replicas)
    model = Stack()
    shard_by(model, mesh["shard"])
    handle = attach_evenly(model, scheme, replicate=mesh["replicate"], **settings)
    seen = Trained()
    left_out = (unused or {}).get(mesh["replicate"].get_local_rank(), ())
    for step in range(steps):
        model.zero_grad()
        for one in range(passes):
            if prepare is not None:
                prepare(model, one, passes)
            model(comm.rank, step * passes + one, left_out).backward()
        for name, part in gradients_of(model).items():
            seen.updates[name] = seen.updates.get(name, torch.zeros_like(part)) + part
    seen.memory, seen.stats = memory_of(handle), handle.stats()
    handle.close()
    return seen


def sums_of(ranks: int, replicas: int, passes: int) -> dict[str, Tensor]:
    """Return the sum over replicas and passes of the gradients, which are means over shards."""
    return {
        name: sum(
            (
                known_gradient(name, parameter, rank, one).double().flatten()
                for rank in range(ranks)
                for one in range(passes)
            ),
            torch.zeros(parameter.numel()).double(),
        )
        * replicas
        / ranks
        for name, parameter in Stack().named_parameters()
    }


def assert_conserved(trained: list[Trained], replicas: int, expected: Mapping[str, Tensor]) -> None:
    """Check Σ memory + R·Σ updates = Σ gradients, by name, exactly."""
    shards = len(trained) // replicas
    for name, gradient in expected.items():
        total = replicas * trained[0].updates[name]
        for one in trained[::shards]:
            total = total + one.memory.get(name, torch.zeros_like(total))
        assert torch.equal(total, gradient), name


def assert_agreed(trained: list[Trained]) -> None:
    """Check that all replicas have the same updates, bit by bit."""
    for one in trained:
        assert one.updates.keys() == trained[0].updates.keys()
        for name, update in one.updates.items():
            assert torch.equal(update, trained[0].updates[name]), name
