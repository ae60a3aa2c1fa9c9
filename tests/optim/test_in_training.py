"""LARS and LAMB in plain DDP and attached, where the ranks share the norms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparcel import simulate
from sparcel.core import kernels
from sparcel.core.comm import Communicator
from sparcel.core.kernels import cpu
from sparcel.core.kernels.definitions import optim as reference
from sparcel.core.optim import LAMB, LARS
from sparcel.errors import CommunicationError
from tests.evenly import attach_evenly
from tests.optim.test_parallel import SLOW_WORK
from tests.strategies import same_bits

MAKES: dict[str, Callable[..., Optimizer]] = {
    "LARS": partial(LARS, lr=3.0, weight_decay=0.01),
    "LAMB": partial(LAMB, lr=0.01, weight_decay=0.01),
}
by = pytest.mark.parametrize("by", MAKES)
SHAPES = [(40, 30), (30,), (), (0,), (300, 400)]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 10))


def loss(net: nn.Module, rank: int, step: int) -> Tensor:
    data = torch.randn(6, 30, generator=torch.Generator().manual_seed(100 * step + rank))
    result: Tensor = (net(data) - data[:, :10]).square().mean()
    return result


def parameters_of(net: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in net.parameters()]


def stepped(by: str, steps: int = 3, **settings: Any) -> list[Tensor]:
    """Return parameters after steps with gradients that all ranks share."""
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.randn(shape, generator=generator) for shape in SHAPES]
    optimizer = MAKES[by](parameters, **settings)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return parameters


@by
@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_that_share_the_norms_make_the_steps_of_one_alone(by: str, world: int) -> None:
    alone = stepped(by)

    def on_rank(comm: Communicator) -> bool:
        comm.rates = SLOW_WORK
        mine = stepped(by, parallel=True, group=comm)
        assert (comm.traffic.messages_sent > 0) == (world > 1)
        return all(map(same_bits, mine, alone))

    assert all(simulate(world, on_rank).results)


@by
@pytest.mark.parametrize("sums_of_squares", [cpu.sums_of_squares, reference.sums_of_squares])
def test_a_copy_that_computes_all_norms_makes_the_same_steps(
    by: str, sums_of_squares: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for tensors of several chunks, and by the kernel of GPUs."""
    monkeypatch.setattr(cpu, "sums_of_squares", sums_of_squares)
    generator = torch.Generator().manual_seed(5)
    shape, dtype = (2, 2, 3, kernels.CHUNK // 2), torch.float64
    weights, gradients = torch.randn(shape, generator=generator, dtype=dtype)

    def on_rank(comm: Communicator) -> bool:
        comm.rates = SLOW_WORK
        optimizer = MAKES[by]([one.clone() for one in weights], parallel=True, group=comm)
        pair = optimizer, copy.deepcopy(optimizer)
        for one in pair:
            for parameter, gradient in zip(one.param_groups[0]["params"], gradients, strict=True):
                parameter.grad = gradient
            before = comm.traffic.messages_sent
            one.step()
            assert (comm.traffic.messages_sent > before) == (one is optimizer)
        found, expected = (one.param_groups[0]["params"] for one in pair)
        return all(map(same_bits, found, expected)) and not same_bits(found[0], weights[0])

    assert all(simulate(2, on_rank).results)


def train(comm: Communicator, by: str, scheme: str | None) -> list[tuple[bool, list[Tensor]]]:
    """Train a model in DDP, attached if a scheme is named, with and without sharing the norms."""
    trained = []
    for parallel in (False, True):
        comm.rates = SLOW_WORK
        ddp = DistributedDataParallel(model())
        optimizer = MAKES[by](ddp.parameters(), parallel=parallel)
        handle = None
        if scheme is not None:
            handle = attach_evenly(ddp, scheme, density=0.05, optimizer=optimizer)
        first = float(loss(ddp.module, 99, 99))
        for step in range(6):
            optimizer.zero_grad()
            loss(ddp, comm.rank, step).backward()
            before = comm.traffic.messages_sent
            optimizer.step()
            assert (comm.traffic.messages_sent > before) == parallel
        trained.append((float(loss(ddp.module, 99, 99)) < first, parameters_of(ddp)))
        if handle is not None:
            handle.close()
    return trained


@pytest.mark.processes
@by
@pytest.mark.parametrize("scheme", [None, "topk"])
def test_they_train_in_ddp_and_attached_alike_on_all_ranks(
    run_on: Any, by: str, scheme: str | None
) -> None:
    results = [row for rank in run_on(2, train, by, scheme) for row in rank]
    for learned, parameters in results:
        assert learned
        assert all(map(same_bits, parameters, results[0][1]))


def poisoned(comm: Communicator, by: str) -> bool:
    """Tell whether a step that one rank's NaN voids changes nothing."""
    comm.rates = SLOW_WORK
    ddp = DistributedDataParallel(model())
    optimizer = MAKES[by](ddp.parameters(), parallel=True)
    handle = attach_evenly(ddp, "topk", density=0.05, optimizer=optimizer)
    loss(ddp, comm.rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before, state = parameters_of(ddp), str(optimizer.state_dict())
    (loss(ddp, comm.rank, 1) * (torch.nan if comm.rank == 0 else 1)).backward()
    optimizer.step()
    handle.close()
    same = all(map(same_bits, parameters_of(ddp), before))
    return same and str(optimizer.state_dict()) == state


@pytest.mark.processes
@by
def test_a_void_step_changes_nothing(run_on: Any, by: str) -> None:
    assert run_on(2, poisoned, by) == [True, True]


def lose(comm: Communicator) -> str:
    """Return what the survivors are told when rank 0 fails instead of making a step."""
    comm.rates = SLOW_WORK
    parameters = [torch.ones(9, 3), torch.ones(4, 4)]
    optimizer = LARS(parameters, lr=3.0, parallel=True)
    for one in parameters:
        one.grad = torch.ones_like(one)
    if comm.rank == 0:
        with pytest.raises(LookupError):
            comm.run(fail)
        return ""
    with pytest.raises(CommunicationError) as caught:
        optimizer.step()
    assert all(bool((one == 1).all()) for one in parameters)
    return str(caught.value)


class FailsLate(LAMB):
    """LAMB that computes the norms of gradients and parameters, and fails at those of updates."""

    norms = 0

    def _norms(self, tensors: Sequence[Tensor]) -> list[float]:
        self.norms += 1
        if self.norms % 2 == 0:
            fail()
        return super()._norms(tensors)


def test_no_parameter_changes_if_a_rank_fails_within_a_step_of_lamb() -> None:
    errors: list[Exception] = []

    def on_rank(comm: Communicator) -> None:
        comm.rates = SLOW_WORK
        parameters = [torch.ones(9, 3), torch.ones(4)]
        optimizer = LAMB(parameters, parallel=True, group=comm)
        if comm.rank == 1:
            optimizer.__class__ = FailsLate
        try:
            for one in parameters:
                one.grad = torch.ones_like(one)
            optimizer.step()
        except Exception as error:
            errors.append(error)
            assert all(one.eq(1).all() for one in parameters)
            raise

    with pytest.raises(LookupError, match="no more data"):
        simulate(2, on_rank)
    assert {type(error) for error in errors} == {LookupError, CommunicationError}


def fail() -> None:
    raise LookupError("no more data")


@pytest.mark.processes
def test_survivors_of_a_rank_that_fails_change_nothing(run_on: Any) -> None:
    told = run_on(3, lose)
    assert all("no more data" in text for text in told[1:])
