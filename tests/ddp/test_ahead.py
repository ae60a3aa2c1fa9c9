"""When a model in DDP computes ahead, and that training then equals a loop by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import AdamW, Optimizer, RMSprop

from sparcel.core.comm import Communicator
from sparcel.core.schemes import scheme
from sparcel.errors import SparcelWarning
from tests.ddp.ahead import (
    LINEAR,
    OPTIMIZERS,
    Checkpointed,
    Gated,
    Make,
    Recurrent,
    Seen,
    are,
    attached,
    convolution,
    data_of,
    linear,
    looked_into,
    loss_of,
    now,
    pass_by,
)
from tests.ddp.models import MANY_BUCKETS, residuals_of
from tests.evenly import even_averager
from tests.strategies import same_bits

pytestmark = pytest.mark.processes


def by_attach(comm: Communicator, make: Make, passes: int, **settings: Any) -> Seen:
    halves = settings.pop("halves", False)
    ddp, handle, optimizer = attached(comm, make, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        for number in range(passes):
            with ddp.no_sync() if number < passes - 1 else nullcontext(), in_halves(halves):
                pass_by(ddp, comm.rank, passes * step + number)
        optimizer.step()
        schedule.step()
        seen.append((now(ddp.module), residuals_of(handle, comm.rank)))
    handle.close()
    return seen


def in_halves(halves: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=halves)


def by_hand(
    comm: Communicator, make: Make, passes: int, model: Callable[[], nn.Module], **settings: Any
) -> Seen:
    """Do what attach does with `Averager` alone."""
    module, halves = model(), settings.pop("halves", False)
    parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
    method = scheme("topk", density=0.02, momentum=settings.pop("momentum", 0.0))
    averager = even_averager(parameters, method, **settings)
    optimizer = make(module.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    ahead, seen = averager.ahead(parameters, optimizer), []
    for step in range(5):
        optimizer.zero_grad()
        for number in range(passes):
            data = data_of(comm.rank, passes * step + number, module)
            with in_halves(halves):
                loss_of(functional_call(module, ahead.moved(), (data,)), data).backward()
        updates = averager.average({name: p.grad for name, p in parameters.items()})
        for name, parameter in parameters.items():
            parameter.grad.copy_(updates[name])
        optimizer.step()
        schedule.step()
        seen.append((now(module), residuals_of(averager.handle, comm.rank)))
    averager.handle.close()
    return seen


def half_frozen() -> nn.Module:
    model = linear()
    model[0].weight.requires_grad_(False)
    return model


CASES: dict[str, dict[str, Any]] = {
    "the optimiser is given": {"by": "AdamW", "known": True},
    "passes are accumulated": {"passes": 2},
    "other orders of memory": {"by": "AdamW", "model": convolution},
    "static graph": {"wrap": {"static_graph": True}},
    "views of buckets": {"by": "AdamW", "passes": 2, "wrap": {"gradient_as_bucket_view": True}},
    "over the whole model": {"model": convolution, "wrap": MANY_BUCKETS, "scope": "model"},
    "mixed precision": {"by": "AdamW", "passes": 2, "halves": True},
    "checkpoints": {"by": "AdamW", "model": partial(Checkpointed, False), "plain": Gated},
    "reentrant checkpoints": {"model": partial(Checkpointed, True), "plain": Gated},
    "recurrent, tied weights": {"by": "AdamW", "model": Recurrent},
    "a part is frozen": {"model": half_frozen},
}


def four_ways(comm: Communicator, case: dict[str, Any]) -> list[Seen]:
    settings = {"model": linear, **case}
    make, passes = OPTIMIZERS[settings.pop("by", "SGD")], settings.pop("passes", 1)
    only_ddp = {name: settings.pop(name) for name in ("wrap", "known") if name in settings}
    plain = settings.pop("plain", settings["model"])
    trainings = [by_attach(comm, make, passes, **settings, **only_ddp)]
    trainings.append(by_hand(comm, make, passes, **{**settings, "model": plain}))
    trainings.append(by_attach(comm, make, passes, ahead=False, **settings, **only_ddp))
    return trainings


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_equals_a_loop_by_hand_and_differs_from_one_without(
    run_on: Any, case: dict[str, Any]
) -> None:
    rough = {"rtol": 1e-2, "atol": 1e-3} if "halves" in case else {"rtol": 1e-5, "atol": 1e-6}
    ranks = run_on(2, four_ways, case)
    for hooked, hand, without in ranks:
        shapes = {name: p.shape for name, p in hooked[0][0].items()}
        large = hooked[0][1].keys()
        assert large
        for step, ((mine, owed), (theirs, kept)) in enumerate(zip(hooked, hand, strict=True)):
            for name in shapes:
                torch.testing.assert_close(mine[name], theirs[name], **rough)
            for name in large:
                # DDP lays gradients out as their parameters lie in memory.
                order = torch.empty_like(mine[name]).copy_(
                    torch.arange(mine[name].numel()).view(shapes[name])
                )
                stored = order.as_strided((order.numel(),), (1,)).long()
                torch.testing.assert_close(owed[name], kept[name][stored], **rough)
            same = [torch.equal(owed[name], without[step][1][name]) for name in large]
            assert all(same) if step == 0 else not any(same)
    for mine, first in zip(ranks[1][0], ranks[0][0], strict=True):
        assert all(same_bits(mine[0][name], first[0][name]) for name in first[0])


def computes_ahead(comm: Communicator, by: str) -> list[bool]:
    """Return, pass by pass, whether the model computes with other values than its parameters."""
    ddp, handle, _ = attached(comm, OPTIMIZERS[by], steps=2)
    module, home = ddp.module, now(ddp.module)
    data, ahead = data_of(comm.rank, 7, module), []

    def look(model: nn.Module) -> None:
        found = looked_into(model, data)[1]
        others = {name for name in home if not same_bits(found[name], home[name])}
        assert others in (set(), LINEAR)
        ahead.append(bool(others))

    for model in (ddp, module):
        for training in (True, False):
            model.train(training)
            look(model)
            with torch.no_grad():
                look(model)
            with torch.inference_mode():
                look(model)
    ddp.train()
    handle.close()
    look(ddp)
    assert are(module, home)
    return ahead


@pytest.mark.parametrize("by", ["AdamW", "LARS"])
def test_a_model_computes_ahead_where_it_trains_and_nowhere_else(run_on: Any, by: str) -> None:
    expected = [True, False, False, False, False, False]
    assert run_on(2, computes_ahead, by) == [[*expected, *expected, False]] * 2


def stay(comm: Communicator) -> list[bool]:
    """Return whether a forward pass in training mode computes with the parameters."""
    stayed = []
    for settings in (
        {"ahead": False},
        {"scheme_or_name": "topk", "density": 1.0},
        {"policy": everything},
        {"steps": 0},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SparcelWarning)  # of the density
            ddp, handle, _ = attached(comm, OPTIMIZERS["SGD"], **{"steps": 2, **settings})
        stayed.append(are(ddp.module, looked_into(ddp, data_of(comm.rank, 7, ddp.module))[1]))
        handle.close()
    return stayed


def everything(name: str, parameter: Tensor) -> bool:
    return True


def test_nothing_moves_if_it_is_not_asked_for_or_nothing_is_owed(run_on: Any) -> None:
    assert run_on(2, stay) == [[True] * 4] * 2


def warned(comm: Communicator) -> list[str]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        _, handle, _ = attached(comm, partial(RMSprop, lr=0.001), steps=3)
        handle.close()
    return [str(one.message) for one in given if one.category is SparcelWarning]


def test_rank_0_tells_of_an_optimiser_of_another_kind_once(run_on: Any) -> None:
    (said,), by_rank_1 = run_on(2, warned)
    assert "RMSprop updates '0.weight'; gradients are computed without it" in said
    assert not by_rank_1


def adversaries(comm: Communicator) -> bool:
    """Train two models in turns as GANs are: each steps while the other, frozen, is in a pass.

    Returns whether what enters the memory is the same if nothing comes between the halves of a
    pass.
    """
    maker, handle, optimizer = attached(comm, OPTIMIZERS["SGD"], steps=2)
    judge = nn.Linear(10, 1)
    by_judge = AdamW(judge.parameters(), lr=0.01)
    data, owed = data_of(comm.rank, 7, maker.module), []
    memory = handle.state_dict()
    for between in (False, True):
        handle.load_state_dict(memory)
        optimizer.zero_grad()
        made = maker(data)
        if between:
            before = judge.weight.detach().clone()
            maker.requires_grad_(False)
            judge(made.detach()).sum().backward()
            by_judge.step()
            maker.requires_grad_(True)
            assert not torch.equal(judge.weight, before)
            with torch.no_grad():
                judge.weight.copy_(before)
        judge(made).sum().backward()
        owed.append(handle.state_dict())
    handle.close()
    return all(torch.equal(owed[0][key], owed[1][key]) for key in owed[0])


def test_steps_of_other_optimisers_may_come_between_the_passes(run_on: Any) -> None:
    assert run_on(2, adversaries) == [True] * 2


class StepsInside(nn.Sequential):
    """A model that does the optimiser's steps when it is called, as Lightning's may."""

    def __init__(self) -> None:
        super().__init__(*linear())

    def forward(self, data: Tensor, ddp: Any, optimizer: Optimizer) -> Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            ddp.reducer._rebuild_buckets()
            ddp.reducer.prepare_for_backward([])
            loss = loss_of(super().forward(data), data)
            loss.backward()
            optimizer.step()
        return loss


def steps_inside(comm: Communicator, by: str) -> list[str]:
    """Return the warnings of a training that ends as one without step-ahead does."""
    seen = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for ahead in (True, False):
            ddp, handle, optimizer = attached(comm, OPTIMIZERS[by], model=StepsInside, ahead=ahead)
            for step in range(2):
                ddp(data_of(comm.rank, step, ddp.module), ddp, optimizer)
            seen.append(now(ddp.module))
            handle.close()
    assert all(same_bits(seen[0][name], seen[1][name]) for name in seen[1])
    return [str(one.message) for one in given if one.category is SparcelWarning]


@pytest.mark.parametrize("by", ["SGD", "AdamW"])
def test_steps_inside_a_call_end_step_ahead_with_a_warning(run_on: Any, by: str) -> None:
    (said,), _ = run_on(2, steps_inside, by)
    assert f"{by} does a step while the model is called" in said


class StepsInAPart(nn.Module):
    """A model that has a step done in a part whose parameters are frozen meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(30, 60), nn.Flatten(), nn.Linear(240, 10))

    def forward(self, data: Tensor, optimizer: Optimizer) -> Tensor:
        self.part[0].requires_grad_(False)
        hook = self.part[0].register_forward_hook(lambda *_: optimizer.step())
        self.part(data)
        hook.remove()
        self.part[0].requires_grad_(True)
        assert "weight" not in vars(self.part[0])
        output: Tensor = self.part(data)
        return output


def steps_in_a_part(comm: Communicator) -> None:
    ddp, handle, optimizer = attached(comm, OPTIMIZERS["SGD"], model=StepsInAPart)
    match = "does a step while the model is called"
    with pytest.warns(SparcelWarning, match=match) if comm.rank == 0 else nullcontext():
        ddp(data_of(comm.rank, 0, ddp.module), optimizer)
    handle.close()


def test_a_step_where_weights_are_frozen_leaves_nothing_of_before(run_on: Any) -> None:
    run_on(2, steps_in_a_part)
