"""Steps that would update parameters with gradients that nobody averages are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from tests.evenly import attach_evenly
from tests.strategies import same_bits

pytestmark = pytest.mark.processes


def unfreeze(layers: nn.Sequential, optimizer: SGD) -> None:
    layers[1].requires_grad_(True)


def unfreeze_and_add(layers: nn.Sequential, optimizer: SGD) -> None:
    unfreeze(layers, optimizer)
    optimizer.param_groups = optimizer.param_groups[:1]
    optimizer.add_param_group({"params": layers[1].parameters()})


def add(layers: nn.Sequential, optimizer: SGD) -> None:
    layers.append(nn.Linear(30, 30))
    optimizer.param_groups[0]["params"] += layers[2].parameters()


def add_what_was_updated(layers: nn.Sequential, optimizer: SGD) -> None:
    layers.append(nn.Linear(30, 30))
    layers[2].weight, layers[2].bias = optimizer.param_groups[2]["params"]


def replace(layers: nn.Sequential, optimizer: SGD) -> None:
    layers[0].weight = nn.Parameter(layers[0].weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = layers[0].weight


def change(
    comm: Communicator, how: Callable[[nn.Sequential, SGD], None], ahead: bool
) -> tuple[str, dict[str, Tensor]]:
    """Return what is said when a part of the model is changed after a step, and the parameters."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30).requires_grad_(False))
    ddp = DistributedDataParallel(layers, find_unused_parameters=True)
    groups = [{"params": one.parameters()} for one in (*layers, nn.Linear(30, 30))]
    optimizer = SGD(groups, lr=0.1)
    handle = attach_evenly(ddp, "topk", density=0.05, ahead=ahead)
    said = ""
    for step in range(2):
        optimizer.zero_grad()
        ddp(torch.full((2, 30), 1.0 + comm.rank)).sum().backward()
        try:
            optimizer.step()
        except InputError as error:
            said = str(error)
        if step == 0:
            how(layers, optimizer)
    handle.close()
    return said, {name: one.detach() for name, one in layers.named_parameters()}


@pytest.mark.parametrize(
    ("how", "name", "ahead"),
    [
        (unfreeze, "1.weight", True),
        (unfreeze_and_add, "1.weight", False),
        (add, "2.weight", True),
        (add_what_was_updated, "2.weight", False),
        (replace, "0.weight", True),
    ],
)
def test_a_layer_that_nobody_averages_is_not_trained(
    run_on: Any, how: Callable[[nn.Sequential, SGD], None], name: str, ahead: bool
) -> None:
    (said, mine), (also, theirs) = run_on(2, change, how, ahead)
    assert said == also
    assert said.startswith(f"'{name}' was frozen when the model was wrapped, or was no part of it")
    if name != "2.weight":  # a new layer, which every rank draws for itself
        assert all(same_bits(one, theirs[key]) for key, one in mine.items())
