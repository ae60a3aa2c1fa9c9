"""A small model with tensors of all kinds, and islands that train it with known gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparcel.core.comm import Communicator
from sparcel.products.outer import Outer, attach

SHAPES: tuple[dict[str, tuple[int, ...]], ...] = (
    {"weight": (8, 9), "bias": (8,)},
    {"scalar": (), "conv": (2, 3, 2, 2)},
    {"three": (3, 4, 5), "one": (1,)},
    {"weight": (70, 64)},
)
"""The parameters of each layer."""

Named = dict[str, Tensor]


class Model(nn.Module):
    """Layers with the same values for the same seed, a frozen parameter, and two buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 3) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList([nn.Module() for _ in SHAPES])
        for layer, shapes in zip(self.layers, SHAPES, strict=True):
            for name, shape in shapes.items():
                values = torch.randn(shape, generator=drawn).to(dtype)
                layer.register_parameter(name, nn.Parameter(values))
        self.last = nn.Parameter(torch.ones(width, dtype=dtype))
        self.frozen = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def descend(
    model: Model, optimizer: Optimizer, number: int, step: int, poison: float | None = None
) -> None:
    """Take an inner step with the gradients of an island's number and its step.

    Where a parameter holds NaN or Inf, all gradients are NaN, as after a forward pass.
    """
    drawn = torch.Generator().manual_seed(1000 * number + step)
    spoilt = not all(bool(one.isfinite().all()) for one in trainable(model).values())
    for parameter in trainable(model).values():
        gradient = torch.randn(parameter.shape, generator=drawn, dtype=torch.float64)
        parameter.grad = gradient.to(parameter.dtype)
        if spoilt:
            parameter.grad.fill_(torch.nan)
    if poison is not None:
        model.last.grad = torch.full_like(model.last, poison)
    model.mean.add_(number)
    optimizer.step()


class Training:
    """One island: a model, its inner optimiser, and what was there before each outer step."""

    def __init__(
        self,
        islands: Any,
        number: int,
        method: Any = None,
        every: int = 2,
        model: Model | None = None,
        make: Callable[..., Optimizer] = torch.optim.SGD,
        **settings: Any,
    ) -> None:
        self.number, self.model, self.done = number, model or Model(), 0
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.before: Named = {}
        self.optimizer.register_step_post_hook(lambda *_: self._look())
        outer = attach(self.model, self.optimizer, method, every=every, islands=islands, **settings)
        assert isinstance(outer, Outer)
        self.outer = outer

    def _look(self) -> None:
        self.before = self.local()

    def step(self, poison: float | None = None) -> None:
        """Take an inner step; a gradient may be NaN or Inf."""
        descend(self.model, self.optimizer, self.number, self.done, poison)
        self.done += 1

    def steps(self, number: int) -> Training:
        for _ in range(number):
            self.step()
        return self

    def local(self) -> Named:
        """Return this island's values of what is exchanged."""
        state = self.model.state_dict()
        return {name: one.clone() for name, one in state.items() if name not in ("frozen", "count")}

    def shared(self) -> Named:
        return {name: tensor.clone() for name, tensor in self.outer.shared.items()}

    def memory(self) -> Named:
        """Return what this island has not sent yet, by name, float64; zeros for none."""
        found = {name: torch.zeros(one.shape).double() for name, one in self.outer.shared.items()}
        for key, part in self.outer._averager.handle.state_dict().items():
            kind, _, name = key.partition(".")
            if kind == f"rank{self.outer._averager.comm.rank}" and name in found:
                found[name] = part.double().view(found[name].shape)
        return found


def same(one: Named, other: Named) -> bool:
    """Tell whether all tensors are bit for bit the same."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train(comm: Communicator, method: Any, steps: int, **settings: Any) -> tuple[Named, Named]:
    """Return what an island has after so many inner steps, and what is shared."""
    island = Training(comm, comm.rank, method, **settings).steps(steps)
    found = island.local(), island.shared()
    island.outer.close()
    return found
