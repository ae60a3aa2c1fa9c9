"""Inner optimisers whose steps outer steps count: fused ones, wrapped ones, schedule-free ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from sparcel import simulate
from sparcel.comm import Communicator
from sparcel.errors import InputError, SparcelWarning
from sparcel.outer import attach, diloco


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused: bool) -> None:
    def on_rank(comm: Communicator) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        outer = attach(model, optimizer, every=2, islands=comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        counted = 0
        for step in range(6):
            for one in model.parameters():
                one.grad = torch.full_like(one, torch.inf if step % 3 == 1 else 4.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            counted += step % 3 != 1
            assert outer.steps == counted // 2

    simulate(1, on_rank)


class Wrapper(Optimizer):
    """An optimiser around another one, without the base's __init__."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Nothing(Optimizer):
    def __init__(self) -> None:
        self.param_groups = []


def test_an_optimizer_inside_of_another_counts() -> None:
    def on_rank(comm: Communicator) -> None:
        model = nn.Linear(4, 4)
        wrapped = Wrapper(Wrapper(SGD(model.parameters(), lr=0.1)))
        outer = attach(model, wrapped, every=2, islands=comm)
        for _ in range(4):
            wrapped.step()
        assert outer.steps == 2
        with pytest.raises(InputError, match="Nothing takes no hooks"):
            attach(model, Nothing(), islands=comm)

    simulate(1, on_rank)


class KeepsCopies(Optimizer):
    """SGD that makes parameters of 16 bits from copies of 32, as fused optimisers for GPUs can."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if "master" not in self.state[one]:
                    self.state[one]["momentum"] = torch.zeros_like(one, dtype=torch.float32)
                    self.state[one]["master"] = one.float()
                copy = self.state[one]["master"]
                copy -= group["lr"] * one.grad
                one.copy_(copy)


def test_copies_that_optimizers_keep_are_exchanged() -> None:
    """Each step moves less than a parameter of 16 bits can."""
    steps, every, step = 40, 4, 2.0**-12

    def on_rank(comm: Communicator) -> None:
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        nn.init.constant_(model.weight, 1.0)
        nn.init.zeros_(model.bias)
        inner = KeepsCopies(model.parameters(), lr=step)
        method = replace(diloco(), lr=1.0, momentum=0.0)
        outer = attach(model, inner, method, every=every, islands=comm)
        for _ in range(steps):
            for one in model.parameters():
                one.grad = torch.full_like(one, 2.0 * comm.rank)  # 1 in the mean
            inner.step()
        shared, done = outer.shared, outer.steps * every * step
        assert torch.equal(shared["weight"], torch.full((2, 3), 1.0 - done))
        assert torch.equal(shared["bias"], torch.full((2,), -done))
        for name, one in model.named_parameters():
            copy = inner.state[one]["master"]
            assert torch.equal(one, copy.bfloat16())
            assert torch.equal(copy, shared[name])

    simulate(2, on_rank)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    def on_rank(comm: Communicator) -> None:
        model = nn.Linear(4, 4)
        copies = [one.detach().clone() for one in model.parameters()]
        with pytest.raises(InputError, match="none of the model's parameters"):
            attach(model, SGD(copies, lr=0.1), islands=comm)

    simulate(1, on_rank)


def test_schedule_free_optimizers_are_told_of() -> None:
    class ScheduleFree(SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    def on_rank(comm: Communicator) -> None:
        model = nn.Linear(4, 4)
        with pytest.warns(SparcelWarning, match="evaluate outer.shared"):
            attach(model, ScheduleFree(model.parameters(), lr=0.1), islands=comm)

    simulate(1, on_rank)
