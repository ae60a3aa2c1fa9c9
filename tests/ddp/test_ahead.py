"""When DDP's parameters are ahead, and that what follows equals a loop that is written by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, RMSprop

from sparcel.comm import Communicator
from sparcel.errors import SparcelWarning
from sparcel.schemes import scheme
from sparcel.training import Averager
from tests.ddp.ahead import (
    LINEAR,
    OPTIMIZERS,
    Make,
    Named,
    Seen,
    are,
    attached,
    convolution,
    data_of,
    functional,
    linear,
    now,
    pass_by,
)
from tests.ddp.models import MANY_BUCKETS, residuals_of
from tests.strategies import same_bits

pytestmark = pytest.mark.processes


def by_attach(comm: Communicator, make: Make, passes: int, **settings: Any) -> Seen:
    ddp, handle, optimizer = attached(comm, make, **settings)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        for number in range(passes):
            with ddp.no_sync() if number < passes - 1 else nullcontext():
                pass_by(ddp, comm.rank, passes * step + number)
        optimizer.step()
        seen.append((now(ddp.module), residuals_of(handle, comm.rank)))
    handle.close()
    return seen


def by_hand(
    comm: Communicator, make: Make, passes: int, model: Callable[[], nn.Module], **settings: Any
) -> Seen:
    """Do what attach does with `Averager` alone."""
    module = model()
    parameters = dict(module.named_parameters())
    method = scheme("topk", density=0.02, momentum=settings.pop("momentum", 0.0))
    averager = Averager(parameters, method, **settings)
    optimizer = make(module.parameters())
    ahead, seen = averager.ahead(parameters, optimizer), []
    for step in range(5):
        optimizer.zero_grad()
        with ahead:
            for number in range(passes):
                pass_by(module, comm.rank, passes * step + number)
        updates = averager.average({name: p.grad for name, p in parameters.items()})
        for name, parameter in parameters.items():
            parameter.grad.copy_(updates[name])
        optimizer.step()
        seen.append((now(module), residuals_of(averager, comm.rank)))
    averager.close()
    return seen


CASES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "AdamW": {"by": "AdamW"},
    "the optimiser is given": {"by": "AdamW", "known": True},
    "passes are accumulated": {"passes": 2},
    "other orders of memory": {"by": "AdamW", "model": convolution},
    "static graph": {"wrap": {"static_graph": True}},
    "views of buckets": {"by": "AdamW", "passes": 2, "wrap": {"gradient_as_bucket_view": True}},
    "over the whole model": {"model": convolution, "wrap": MANY_BUCKETS, "scope": "model"},
}


def four_ways(comm: Communicator, case: dict[str, Any]) -> list[Seen]:
    settings = {"model": linear, **case}
    make, passes = OPTIMIZERS[settings.pop("by", "SGD")], settings.pop("passes", 1)
    only_ddp = {name: settings.pop(name) for name in ("wrap", "known") if name in settings}
    trainings = [by_attach(comm, make, passes, **settings, **only_ddp)]
    trainings.append(by_hand(comm, make, passes, **settings))
    trainings.append(by_attach(comm, make, passes, ahead=False, **settings, **only_ddp))
    return trainings


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_equals_a_loop_by_hand_and_differs_from_one_without(
    run_on: Any, case: dict[str, Any]
) -> None:
    ranks = run_on(2, four_ways, case)
    for hooked, hand, without in ranks:
        shapes = {name: p.shape for name, p in hooked[0][0].items()}
        large = hooked[0][1].keys()
        assert len(large) == 2
        for step, ((mine, owed), (theirs, kept)) in enumerate(zip(hooked, hand, strict=True)):
            for name in shapes:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6)
            for name in large:
                # DDP lays gradients out as their parameters lie in memory.
                order = torch.empty_like(mine[name]).copy_(
                    torch.arange(mine[name].numel()).view(shapes[name])
                )
                stored = order.as_strided((order.numel(),), (1,)).long()
                torch.testing.assert_close(owed[name], kept[name][stored], rtol=1e-4, atol=1e-6)
            same = [torch.equal(owed[name], without[step][1][name]) for name in large]
            assert all(same) if step == 0 else not any(same)
    for mine, first in zip(ranks[1][0], ranks[0][0], strict=True):
        assert all(same_bits(mine[0][name], first[0][name]) for name in first[0])


def places(comm: Communicator, by: str) -> None:
    """Check where the parameters are at any moment in which they may be looked at."""
    ddp, handle, optimizer = attached(comm, OPTIMIZERS[by], steps=2)
    home, data = now(ddp.module), data_of(comm.rank, 7, ddp.module)
    there = functional(ddp.module, home, data)

    def begin() -> Named:
        """Do a forward pass, and no backward pass."""
        ddp.train()
        ddp(data)
        away = now(ddp.module)
        assert {name for name in home if not torch.equal(away[name], home[name])} == LINEAR
        return away

    for _ in range(2):
        with ddp.no_sync():
            away = begin()
            pass_by(ddp, comm.rank, 7)
        assert are(ddp.module, away)  # no further, and not back before the last pass
    pass_by(ddp, comm.rank, 8)
    assert are(ddp.module, home)
    with torch.no_grad():
        assert same_bits(ddp(data), there)
    assert are(ddp.module, home)
    begin()
    assert same_bits(ddp.eval()(data).detach(), there)
    assert are(ddp.module, home)
    begin()
    with torch.inference_mode():
        assert same_bits(ddp.eval()(data).clone(), there)
    assert are(ddp.module, home)
    for model in (ddp, ddp.module):
        begin()
        state = {name.removeprefix("module."): one for name, one in model.state_dict().items()}
        assert all(same_bits(state[name], home[name]) for name in home)
        assert are(ddp.module, home)
    broken = ddp.train()(data)
    broken.register_hook(fail)
    with pytest.raises(LookupError):
        broken.sum().backward()
    pass_by(ddp, comm.rank, 9)
    assert are(ddp.module, home)
    begin()
    optimizer.zero_grad()
    optimizer.step()  # without gradients it changes nothing
    assert are(ddp.module, home)
    ddp.train()
    handle.close()
    ddp(data)
    assert are(ddp.module, home)


def fail(gradient: Tensor) -> None:
    raise LookupError


@pytest.mark.parametrize("by", OPTIMIZERS)
def test_parameters_are_ahead_from_a_forward_pass_to_the_end_of_its_backward_pass(
    run_on: Any, by: str
) -> None:
    run_on(2, places, by)


def stay(comm: Communicator) -> list[bool]:
    """Return whether parameters are where they belong after a forward pass in training mode."""
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
        home = now(ddp.module)
        ddp(data_of(comm.rank, 7, ddp.module))
        stayed.append(are(ddp.module, home))
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


def test_an_optimiser_of_another_kind_is_told_once(run_on: Any) -> None:
    for (said,) in run_on(2, warned):
        assert "RMSprop updates '0.weight'; gradients are computed without it" in said


def adversaries(comm: Communicator) -> tuple[bool, bool]:
    """Train two models in turns as GANs are: each steps while the other is in a pass.

    Returns whether what enters the memory is the same if nothing comes between the halves of a
    pass, and whether the parameters are where they belong afterwards.
    """
    maker, handle, optimizer = attached(comm, OPTIMIZERS["SGD"], steps=2)
    judge = nn.Linear(10, 1)
    by_judge = AdamW(judge.parameters(), lr=0.01)
    data, owed = data_of(comm.rank, 7, maker.module), []
    memory, home = handle.state_dict(), now(maker.module)
    for between in (False, True):
        handle.load_state_dict(memory)
        optimizer.zero_grad()
        made = maker(data)
        if between:
            before = judge.weight.detach().clone()
            judge(made.detach()).sum().backward()
            by_judge.step()
            assert not torch.equal(judge.weight, before)
            with torch.no_grad():
                judge.weight.copy_(before)
        judge(made).sum().backward()
        owed.append(handle.state_dict())
    at_home = are(maker.module, home)
    handle.close()
    return all(torch.equal(owed[0][key], owed[1][key]) for key in owed[0]), at_home


def test_steps_of_other_optimisers_may_come_between_the_passes(run_on: Any) -> None:
    assert run_on(2, adversaries) == [(True, True)] * 2
