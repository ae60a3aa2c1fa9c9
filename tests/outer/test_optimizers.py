"""Inner optimisers whose steps outer steps count: fused ones, wrapped ones, schedule-free ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.errors import InputError, SparcelWarning
from sparcel.products.outer import attach, diloco, streaming


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


ADAPTIVE: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(torch.optim.Adam, betas=(0.5, 0.99)),
    "fused": partial(torch.optim.AdamW, fused=True),
    "nadam": torch.optim.NAdam,
    "rmsprop": partial(torch.optim.RMSprop, alpha=0.7),
}


def second_moments(
    make: Callable[..., Optimizer], dtype: torch.dtype, spoilt: int | None = None
) -> list[list[dict[str, float]]]:
    """Return the second moments of three islands after each of three outer steps, by parameter.

    Gradients of island r are r + 2, and it learns from r + 1 samples a step. The optimisers have
    done unlike numbers of steps, and island 2 has none of the bias. Of one island, parameters hold
    Inf in the first outer step.
    """

    def on_rank(comm: Communicator) -> list[dict[str, float]]:
        model = nn.Linear(3, 2, dtype=dtype)
        inner = make(model.parameters(), lr=1e-3)

        def step() -> None:
            model.weight.grad = torch.full_like(model.weight, comm.rank + 2)
            model.bias.grad = None if comm.rank == 2 else torch.full_like(model.bias, comm.rank + 2)
            inner.step()

        for _ in range(20 + 10 * comm.rank):
            step()
        for one in model.parameters():
            nn.init.zeros_(one)
        method, found = replace(diloco(), moments=2), list[dict[str, float]]()
        outer = attach(model, inner, method, every=2, islands=comm)
        while outer.steps < 3:
            if outer.steps == 0 and comm.rank == spoilt:
                nn.init.constant_(model.weight, torch.inf)
            outer.count(comm.rank + 1)
            step()
            if outer.steps > len(found):
                moments = outer._shared.model.moments().items()  # type: ignore[union-attr]
                found.append({name: float(one.kept[0].max() / one.bias) for name, one in moments})
        return found

    return simulate(3, on_rank).results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_second_moments_become_averages(name: str, dtype: torch.dtype) -> None:
    """In the first and third outer step, if all islands have them."""
    first, second, third = zip(*second_moments(ADAPTIVE[name], dtype), strict=True)
    close = 1e-3 if dtype == torch.float32 else 0.05
    mean = (1 * 4 + 2 * 9 + 3 * 16) / 6
    assert [one["weight"] for one in first] == pytest.approx([mean] * 3, rel=close)
    assert [one["bias"] for one in first[:2]] == pytest.approx([4, 9], rel=close)
    assert len({one["weight"] for one in second}) == 3
    assert [one["weight"] for one in third] == pytest.approx([third[0]["weight"]] * 3, rel=close)


def test_an_island_with_inf_brings_no_second_moments() -> None:
    first, *_ = zip(*second_moments(ADAPTIVE["adam"], torch.float32, spoilt=0), strict=True)
    mean = (2 * 9 + 3 * 16) / 5
    assert [one["weight"] for one in first] == pytest.approx([4, mean, mean], rel=1e-3)


def test_second_moments_that_will_be_forgotten_are_not_averaged() -> None:
    """Of which less than a tenth is left when the next would come, four steps later."""
    make = partial(torch.optim.Adam, betas=(0.5, 0.5))
    first, *_ = zip(*second_moments(make, torch.float32), strict=True)
    assert [one["weight"] for one in first] == pytest.approx([4, 9, 16], rel=1e-3)


def test_second_moments_are_not_averaged_beside_inner_steps() -> None:
    with pytest.raises(InputError, match="only without overlap"):
        replace(streaming(), moments=16)


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
