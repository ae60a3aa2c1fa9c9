"""Models whose training on a GPU has the bits of the CPU, or is as close as float64 allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.core.schemes import SPARSER, Hierarchical, Scheme
from tests.ddp.models import SHAPES, Linear, known_gradient, observe, residuals_of
from tests.evenly import attach_evenly
from tests.schemes.test_on_card import ALL

SAMPLED = {
    "first": (700, 600),
    "bias": (40,),
    "second": (500, 900),
    "norm": (50,),
    "third": (9, 900),
}
"""Two of these vectors are so long that selection begins with a sample."""
SAMPLED_BUCKETS = {"bucket_cap_mb": 1.8}
"""Splits `SAMPLED` into buckets."""

SELECTING: dict[str, Any] = {**SPARSER}
TOPK = {"scheme_or_name": "topk", "density": 0.05}
METHODS = {"selecting": SELECTING, "topk": TOPK}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))


class Known(Linear):
    """Gradients are small integers, of which no device rounds a sum."""

    def forward(self, rank: int, step: int) -> Tensor:
        parts = [
            (parameter * known_gradient(name, parameter, rank, step).to(parameter.device)).sum()
            for name, parameter in self.named_parameters()
        ]
        return torch.stack([part.double() for part in parts]).sum()


class Springs(nn.Module):
    """Each number is drawn to one of this rank and step; no operation adds up numbers.

    So any device computes the same bits in each run, which products of matrices need not have.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, targets: Mapping[str, Tensor]) -> Tensor:
        parts = [(own - targets[name]).square().sum() for name, own in self.named_parameters()]
        return torch.stack(parts).sum()


def targets_of(model: Springs, rank: int, step: int) -> dict[str, Tensor]:
    """Return what a rank's numbers are drawn to in a step, drawn at random."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(own.shape, generator=generator, dtype=torch.float64).to(own)
        for name, own in model.named_parameters()
    }


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small network; in float64 devices differ too little for another selection."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Return the loss of a network on a rank's batch of a step."""
    own = next(model.parameters())
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(16, 64, generator=generator, dtype=torch.float64).to(own)
    result: Tensor = (model(batch) - batch.roll(1, 1)).square().mean()
    return result


def scheme_named(name: str, ranks: int) -> Scheme:
    """Return one of `ALL`; nodes have half of the ranks if there are more than two."""
    scheme = ALL[name]()
    if isinstance(scheme, Hierarchical) and ranks > 2:
        return replace(scheme, ranks_per_node=ranks // 2)
    return scheme


@dataclass
class Trained:
    """The updates of each step and the memory at the end, by name, in float64 on the CPU."""

    updates: list[dict[str, Tensor]] = field(default_factory=list)
    memory: dict[str, Tensor] = field(default_factory=dict)


def train(
    comm: Communicator,
    place: torch.device | str,
    method: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    dtypes: Mapping[str, torch.dtype] | None = None,
    wrap: Mapping[str, Any] | None = None,
    micro_steps: int = 1,
    meanwhile: Callable[[], None] | None = None,
) -> Trained:
    """Do four steps of `Known` in DDP, each of so many backward passes.

    ``meanwhile`` is called where the backward pass has a gradient.
    """
    ddp = DistributedDataParallel(Known(shapes, dtypes).to(place), **(wrap or {}))
    handle = attach_evenly(ddp, **method)
    for parameter in ddp.parameters() if meanwhile else ():
        parameter.register_hook(lambda _: meanwhile())
    seen = Trained()
    for step in range(4):
        ddp.zero_grad()
        for micro_step in range(micro_steps):
            last = micro_step == micro_steps - 1
            with nullcontext() if last else ddp.no_sync():
                ddp(comm.rank, step * micro_steps + micro_step).backward()
        seen.updates.append(on_cpu(observe(ddp)))
    seen.memory = on_cpu(residuals_of(handle, comm.rank))
    handle.close()
    return seen


def on_cpu(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU."""
    return {name: one.detach().to("cpu", copy=True) for name, one in named.items()}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters of a model in DDP on the CPU."""
    return on_cpu({name.removeprefix("module."): one for name, one in model.named_parameters()})


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that tensors have the same numbers."""
    assert_near(found, expected, 0)


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float) -> None:
    """Check that tensors have the same numbers up to this error, relative or absolute."""
    assert found.keys() == expected.keys()
    for name, other in expected.items():
        try:
            torch.testing.assert_close(found[name], other, rtol=within, atol=within)
        except AssertionError as error:
            error.add_note(f"these are {name!r}")
            raise
