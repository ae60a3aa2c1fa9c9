"""Parameters have the names of the user's model, whatever it is wrapped in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from tests.ddp.models import residuals_of
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes


class Owner(nn.Module):
    """Has a part that is called "module", as DDP's is."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(40, 30)
        self.last = nn.Linear(30, 40)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.last(self.module(data))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 40))


def compiled() -> nn.Module:
    return torch.compile(plain(), backend="eager")


def wrapped_in_part() -> nn.Module:
    model = plain()
    model[0] = checkpoint_wrapper(torch.compile(model[0], backend="eager"))
    return model


def names_of(comm: Communicator, make: Any, densities: dict[str, float]) -> tuple[Any, ...]:
    """Return the names of tensors made sparse, those given to the policy, and those saved."""
    seen: list[str] = []

    def policy(name: str, parameter: torch.Tensor) -> bool:
        seen.append(name)
        return parameter.ndim < 2

    ddp = DistributedDataParallel(make())
    handle = attach_evenly(ddp, "topk", policy=policy, densities=densities)
    ddp(torch.ones(3, 40)).square().sum().backward()
    saved = residuals_of(handle, comm.rank)
    handle.close()
    return handle.sparse, set(seen), {name for name, owed in saved.items() if owed.any()}


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (plain, "module.1.weight"),
        (compiled, "module._orig_mod.1.weight"),
        (wrapped_in_part, "1.weight"),
    ],
)
def test_wrappers_do_not_show_in_names(run_on: Any, make: Any, pattern: str) -> None:
    for sparse, seen, saved in run_on(2, names_of, make, {pattern: 1}):
        assert sparse == saved == {"0.weight"}
        assert seen == {"0.weight", "0.bias", "1.bias"}


def test_a_part_of_the_model_may_be_called_module(run_on: Any) -> None:
    for sparse, _, saved in run_on(2, names_of, Owner, {"module.weight": 1}):
        assert sparse == saved == {"last.weight"}
