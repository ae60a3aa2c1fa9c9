"""Accelerate: what it wraps is recognised, and FullState carries the memory in its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparcel
from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from sparcel.integrations import FullState
from tests.integrations.launched import (
    Trained,
    as_by_accelerate,
    assert_not_interrupted,
    largest,
    needs,
)

pytestmark = needs("accelerate")

STEPS = 6
SAVED = 3


def trained(comm: Communicator, folder: Path, resumed: bool, scaled: bool) -> Trained:
    """Train by all that Accelerate wraps; save after ``SAVED`` steps, or go on from there.

    With a scaler, rank 1 has a gradient of the second step that is not finite.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if scaled:  # Accelerate makes one for fp16, which it allows on GPUs alone
        accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
    batches = DataLoader(TensorDataset(torch.randn(STEPS * 16, 40)), batch_size=4)
    model, optimizer, batches, schedule = accelerator.prepare(net, adam, batches, decay)
    handle = sparcel.attach(
        model,
        "topk",
        density=0.05,
        frontload=False,
        optimizer=optimizer,
        scaler=accelerator.scaler,
    )
    accelerator.register_for_checkpointing(FullState(handle))
    if resumed:
        accelerator.load_state(str(folder))
        batches = accelerator.skip_first_batches(batches, 2 * SAVED)
    for number, (batch,) in enumerate(batches, 1 + 2 * SAVED * resumed):
        with accelerator.accumulate(model):
            error = (model(batch) - batch.flip(1)).square().mean()
            poisoned = scaled and number == 3 and comm.rank == 1
            accelerator.backward(error * torch.inf if poisoned else error)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number == 2 * SAVED and not resumed:
            accelerator.save_state(str(folder))
    handle.close()
    parameters = [parameter.detach() for parameter in net.parameters()]
    return Trained(parameters, handle.state_dict(), handle.stats())


def interrupted(comm: Communicator, folder: Path, scaled: bool) -> tuple[Trained, Trained]:
    with as_by_accelerate(comm):
        return trained(comm, folder, False, scaled), trained(comm, folder, True, scaled)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_resumed_training_ends_as_one_that_was_not_interrupted(
    run_on: Any, tmp_path: Path, scaled: bool
) -> None:
    ranks = run_on(2, interrupted, tmp_path, scaled)
    assert_not_interrupted(ranks, STEPS, SAVED)
    for rank, (through, _) in enumerate(ranks):
        assert through.stats.void_steps == scaled
        assert 0 < largest(through.memory, rank) < 1  # memory of gradients that are not scaled


def of_one_rank(comm: Communicator, folder: Path) -> str:
    """Register the handle itself, and return what a rank is told when it loads."""
    from accelerate import Accelerator

    with as_by_accelerate(comm):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(40, 60))
        handle = sparcel.attach(model, "topk")
        accelerator.register_for_checkpointing(handle)
        model(torch.ones(1, 40)).sum().backward()
        accelerator.save_state(str(folder))
        accelerator.wait_for_everyone()  # rank 0 has written it
        told = ""
        try:
            accelerator.load_state(str(folder))
        except InputError as error:
            told = str(error)
        handle.close()
        return told


def test_a_handle_by_itself_would_lose_memory_and_says_so(run_on: Any, tmp_path: Path) -> None:
    first, second = run_on(2, of_one_rank, tmp_path)
    assert not first
    assert "rank 1" in second
