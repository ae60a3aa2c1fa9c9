"""When DDP's parameters are ahead, and that what follows equals a loop that is written by hand."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import sparcel
from sparcel.comm import Communicator
from sparcel.errors import SparcelWarning
from sparcel.schemes import scheme
from sparcel.training import Averager
from tests.ddp.models import MANY_BUCKETS, residuals_of
from tests.strategies import same_bits

pytestmark = pytest.mark.processes

Named = dict[str, Tensor]
Make = Callable[[Iterable[Tensor]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": partial(AdamW, lr=0.01, weight_decay=0.1),
}
LINEAR = {"0.weight", "3.weight"}


def linear() -> nn.Module:
    """Return a model whose weights are sparse and whose biases are not; its inputs are images."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Flatten(), nn.Linear(240, 10))


def convolution() -> nn.Module:
    """Return a model with weights in other orders of memory."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 40, (2, 7)), nn.Tanh(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 4, 4, 30))
    model = model.to(memory_format=torch.channels_last)
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    assert not any(model[place].weight.is_contiguous() for place in (0, 3))
    return model


def data_of(rank: int, step: int, model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = (6, 4, 30) if isinstance(model[0], nn.Linear) else (6, 4, 4, 30)
    return torch.randn(shape, generator=generator)


def loss_of(output: Tensor, data: Tensor) -> Tensor:
    return (output - data.flatten(1)[:, :10]).square().mean()


def now(model: nn.Module) -> Named:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def are(model: nn.Module, expected: Named) -> bool:
    return all(same_bits(one, expected[name]) for name, one in now(model).items())


def pass_by(model: nn.Module, rank: int, step: int) -> None:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    data = data_of(rank, step, inner)
    loss_of(model(data), data).backward()


def attached(
    comm: Communicator, make: Make, known: bool = False, steps: int = 0, **settings: Any
) -> tuple[DistributedDataParallel, sparcel.ddp.Handle, Optimizer]:
    """Return a model after some steps."""
    ddp = DistributedDataParallel(settings.pop("model", linear)(), **settings.pop("wrap", {}))
    optimizer = make(ddp.parameters())
    optional = {"optimizer": optimizer} if known else {}
    settings = {"scheme_or_name": "topk", "density": 0.02, **settings}
    handle = sparcel.attach(ddp, **optional, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        pass_by(ddp, comm.rank, step)
        optimizer.step()
    return ddp, handle, optimizer


Seen = list[tuple[Named, Named]]
"""The parameters and the memory after each step."""


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
    for attached, hand, without in ranks:
        shapes = {name: p.shape for name, p in attached[0][0].items()}
        large = attached[0][1].keys()
        assert len(large) == 2
        for step, ((mine, owed), (theirs, kept)) in enumerate(zip(attached, hand, strict=True)):
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


def functional(module: nn.Module, parameters: Named, data: Tensor) -> Tensor:
    return torch.func.functional_call(module, parameters, (data,)).detach()


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
