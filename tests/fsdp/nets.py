"""A small network, sharded block by block, and its training on random data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH = 36


class Layer(nn.Module):
    def __init__(self, reentrant: bool | None, inner: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH))
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self._reentrant is None or not self.training:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self._reentrant)


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None, inner: int = 61) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Layer(reentrant, inner) for _ in range(2)])
        self.last = nn.Linear(WIDTH, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


def sharded(mesh: DeviceMesh, apply: Any = fully_shard, settings: Any = None, **net: Any) -> Net:
    model = Net(**net)
    for block in model.blocks:
        apply(block, mesh=mesh, **(settings or {}))
    applied: Net = apply(model, mesh=mesh, **(settings or {}))
    return applied


def samples(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, WIDTH, generator=generator)
    return x, torch.randint(0, 40, (6,), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = samples(rank, step)
    return nn.functional.cross_entropy(model(x).float(), y)
