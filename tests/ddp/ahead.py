"""Models that are attached and trained ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import sparcel
from sparcel.core.comm import Communicator
from sparcel.core.optim import LAMB, LARS
from tests.evenly import attach_evenly
from tests.strategies import same_bits

Named = dict[str, Tensor]
Make = Callable[[Iterable[Tensor]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": partial(AdamW, lr=0.01, weight_decay=0.1),
    "LARS": partial(LARS, lr=5.0, weight_decay=0.01, parallel=True),
    "LAMB": partial(LAMB, lr=0.01, weight_decay=0.01, parallel=True),
}
LINEAR = {"0.weight", "3.weight"}


def linear() -> nn.Module:
    """Return a model whose weights are sparse and whose biases are not; its inputs are images."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Flatten(), nn.Linear(240, 10))


def convolution() -> nn.Module:
    """Return a model with weights in other orders of memory."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 40, (2, 7)), nn.Tanh(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 4, 4, 30))
    model = model.to(memory_format=torch.channels_last)
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    assert not any(model[place].weight.is_contiguous() for place in (0, 3))
    return model


class Checkpointed(nn.Sequential):
    """A model like `linear` whose first layers are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(*linear())
        self.reentrant = reentrant

    def forward(self, data: Tensor) -> Tensor:
        first, *others = self
        data = data.requires_grad_()  # what reentrant checkpoints need
        hidden = checkpoint(self._twice, first, data, use_reentrant=self.reentrant)
        return nn.Sequential(*others)(hidden)

    def _twice(self, layer: nn.Module, data: Tensor) -> Tensor:
        """Depend on the layer's values also by its input's gradient."""
        return layer(data) * layer(data).sigmoid()


class Gated(nn.Sequential):
    """What `Checkpointed` computes, without a checkpoint."""

    def __init__(self) -> None:
        super().__init__(*linear())

    def forward(self, data: Tensor) -> Tensor:
        first, *others = self
        hidden = first(data) * first(data).sigmoid()
        return nn.Sequential(*others)(hidden)


class Recurrent(nn.Sequential):
    """A recurrent network, which keeps a list of its weights, and a weight that is used twice."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.LSTM(30, 30, batch_first=True), nn.Linear(30, 40), nn.Linear(40, 30))
        self.tied = nn.Linear(30, 40)
        self.tied.weight = self[1].weight

    def forward(self, data: Tensor) -> Tensor:
        hidden, _ = self[0](data)
        return (self[2](self[1](hidden)) + self[2](self.tied(data))).mean(1)[:, :10]


def data_of(rank: int, step: int, model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = any(isinstance(part, nn.Conv2d) for part in model.modules())
    shape = (6, 4, 4, 30) if images else (6, 4, 30)
    return torch.randn(shape, generator=generator)


def loss_of(output: Tensor, data: Tensor) -> Tensor:
    return (output - data.flatten(1)[:, :10]).square().mean()


def now(model: nn.Module) -> Named:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def are(model: nn.Module, expected: Named) -> bool:
    return all(same_bits(one, expected[name]) for name, one in now(model).items())


def looked_into(model: nn.Module, data: Tensor) -> tuple[Tensor, Named]:
    """Call a model, and also return what its module finds as attributes."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    found: Named = {}

    def look(module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            assert parameter.is_leaf
            found[name] = attrgetter(name)(module).detach().clone()

    hook = module.register_forward_hook(look)
    output = model(data)
    hook.remove()
    return output, found


def pass_by(model: nn.Module, rank: int, step: int) -> None:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    data = data_of(rank, step, inner)
    loss_of(model(data), data).backward()


def attached(
    comm: Communicator, make: Make, known: bool = False, steps: int = 0, **settings: Any
) -> tuple[DistributedDataParallel, sparcel.Handle, Optimizer]:
    """Return a model after some steps."""
    ddp = DistributedDataParallel(settings.pop("model", linear)(), **settings.pop("wrap", {}))
    optimizer = make(ddp.parameters())
    optional = {"optimizer": optimizer} if known else {}
    settings = {"scheme_or_name": "topk", "density": 0.02, **settings}
    handle = attach_evenly(ddp, **optional, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        pass_by(ddp, comm.rank, step)
        optimizer.step()
    return ddp, handle, optimizer


Seen = list[tuple[Named, Named]]
"""The parameters and the memory after each step."""


def functional(module: nn.Module, parameters: Named, data: Tensor) -> Tensor:
    return torch.func.functional_call(module, parameters, (data,)).detach()
