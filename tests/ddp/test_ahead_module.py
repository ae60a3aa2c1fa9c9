"""Loading, copying and saving a module whose parameters are ahead, and its end."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparcel.comm import Communicator
from tests.ddp.ahead import (
    OPTIMIZERS,
    are,
    attached,
    data_of,
    functional,
    loss_of,
    now,
    pass_by,
)
from tests.strategies import same_bits

pytestmark = pytest.mark.processes

INTERRUPTIONS: dict[str, Callable[[DistributedDataParallel, Tensor], Any]] = {
    "a forward pass without gradients": lambda ddp, data: torch.no_grad()(ddp)(data),
    "a checkpoint": lambda ddp, data: ddp.state_dict(),
}


def interrupted(comm: Communicator, what: str) -> bool:
    """Return whether the parameters are where they belong after an interrupted pass."""
    ddp, handle, _ = attached(comm, OPTIMIZERS["SGD"], steps=2)
    home, data = now(ddp.module), data_of(comm.rank, 7, ddp.module)
    output = ddp(data)
    INTERRUPTIONS[what](ddp, data)
    loss_of(output, data).backward()
    handle.close()
    return are(ddp.module, home)


@pytest.mark.parametrize("what", INTERRUPTIONS)
def test_a_pass_survives_what_comes_between_its_halves(run_on: Any, what: str) -> None:
    assert run_on(2, interrupted, what) == [True] * 2


def replaced(comm: Communicator) -> list[bool]:
    """Return whether weights that are loaded stay, and whether the bare module is where it was."""
    ddp, handle, _ = attached(comm, OPTIMIZERS["SGD"], steps=2)
    home, data = now(ddp.module), data_of(comm.rank, 7, ddp.module)
    ddp(data)
    ddp.eval()
    with torch.no_grad():
        evaluated = same_bits(ddp.module(data), functional(ddp.module, home, data))
    ddp.train()
    ddp(data)
    best = {name: 2 * one for name, one in home.items()}
    ddp.module.load_state_dict(best)
    ddp.eval()(data)
    handle.close()
    return [evaluated, are(ddp.module, best)]


def test_weights_that_are_loaded_stay_and_the_bare_module_evaluates_at_home(run_on: Any) -> None:
    assert run_on(2, replaced) == [[True, True]] * 2


def copied(comm: Communicator) -> list[bool]:
    """Return whether copies of the module have its weights, and live apart from its training."""
    ddp, handle, optimizer = attached(comm, OPTIMIZERS["SGD"], steps=2)
    home, saved = now(ddp.module), io.BytesIO()
    average = torch.optim.swa_utils.AveragedModel(ddp.module).module
    torch.save(ddp.module, saved)
    saved.seek(0)
    copies = [copy.deepcopy(ddp.module), average, torch.load(saved, weights_only=False)]
    pass_by(ddp, comm.rank, 2)
    optimizer.step()
    for one in copies:
        one(data_of(comm.rank, 7, one))
        one.load_state_dict(one.state_dict())
    handle.close()
    return [are(one, home) for one in copies]


def test_the_module_can_be_copied_and_saved_whole(run_on: Any) -> None:
    assert run_on(2, copied) == [[True] * 3] * 2


def outlived(comm: Communicator) -> bool:
    """Return whether the exchange ends with DDP, even if the module itself is needed longer."""
    ddp, handle, optimizer = attached(comm, OPTIMIZERS["SGD"], steps=2)
    module, watched = ddp.module, weakref.ref(handle)
    del ddp, handle
    optimizer.zero_grad()
    gc.collect()
    module(data_of(comm.rank, 7, module))
    module.state_dict()
    optimizer.step()
    return watched() is None


def test_a_module_that_outlives_its_training_leaves_nothing_behind(run_on: Any) -> None:
    assert run_on(2, outlived) == [True] * 2
