"""Unusual backward passes, and the order of events within a pass."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sparcel.core.comm import Communicator
from sparcel.core.schemes import Dense, Hierarchical, OkTopK, Scheme
from sparcel.errors import InputError
from tests.ddp.models import (
    MANY_BUCKETS,
    Linear,
    Trained,
    assert_agreed,
    assert_conserved,
    count_buckets,
    gradient_sums,
    known_gradient,
    observe,
    residuals_of,
)
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes


class Patient(Dense):
    """A scheme whose step begins only after the last gradient of the backward pass."""

    may_begin = threading.Event()

    def begin(self, gradient: Tensor, comm: Communicator, *rest: Any, **more: Any) -> Any:
        assert self.may_begin.wait(60), "the backward pass waits for an exchange"
        return super().begin(gradient, comm, *rest, **more)


def overlap(comm: Communicator) -> tuple[int, bool]:
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    handle = attach_evenly(ddp, Patient())
    buckets: list[int] = []
    count_buckets(handle, buckets)
    Patient.may_begin.set()
    ddp(comm.rank, 0).backward()
    Patient.may_begin.clear()
    last = ddp.module.first  # its gradient is ready last
    last.register_hook(lambda gradient: Patient.may_begin.set())
    ddp(comm.rank, 1).backward()
    handle.close()
    return buckets[-1], Patient.may_begin.is_set()


def test_exchanges_do_not_delay_the_backward_pass(run_on: Any) -> None:
    assert run_on(2, overlap) == [(3, True)] * 2


def ends_of_steps(comm: Communicator, wrap: dict[str, Any]) -> list[tuple[str, int]]:
    """Return whether each step ended before DDP had its updates, and the number of ends so far."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS, **wrap)
    handle = attach_evenly(ddp, "topk")
    named = dict(ddp.module.named_parameters())
    raw: dict[str, Tensor] = {}
    events: list[str] = []
    account = handle._session.count

    def account_and_look(*arguments: Any) -> None:
        account(*arguments)
        untouched = all(torch.equal(p.grad, raw[name]) for name, p in named.items())
        events.append("before DDP went on" if untouched else "after")

    handle._session.count = account_and_look
    seen = []
    for step in range(3):
        ddp.zero_grad()
        raw |= {name: known_gradient(name, p, comm.rank, step) for name, p in named.items()}
        ddp(comm.rank, step).backward()
        seen.append((events[-1], len(events)))
    handle.close()
    return seen


@pytest.mark.parametrize("wrap", [{}, {"static_graph": True}], ids=["dynamic", "static"])
def test_a_step_ends_once_and_before_ddp_goes_on(run_on: Any, wrap: dict[str, Any]) -> None:
    expected = [("before DDP went on", count) for count in (1, 2, 3)]
    assert run_on(2, ends_of_steps, wrap) == [expected] * 2


class Reentrant(nn.Module):
    """`Linear` in which each parameter's term runs a separate pass within the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear()

    def forward(self, rank: int, step: int) -> Tensor:
        start = torch.zeros((), dtype=torch.float64, requires_grad=True)

        def term(total: Tensor, name: str) -> Tensor:
            parameter = getattr(self.inner, name)
            coefficients = known_gradient(name, parameter, rank, step)
            return total + (parameter * coefficients).double().sum()

        for name, _ in self.inner.named_parameters():
            start = checkpoint(term, start, name, use_reentrant=True)
        return start


def train_reentrant(comm: Communicator, scheme: str | None, **settings: Any) -> Trained:
    ddp = DistributedDataParallel(Reentrant(), **MANY_BUCKETS)
    handle = None if scheme is None else attach_evenly(ddp, scheme, **settings)
    seen = Trained()
    for step in range(4):
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
        update = {name.removeprefix("inner."): part for name, part in observe(ddp).items()}
        seen.every_update.append(update)
        for name, part in update.items():
            seen.updates[name] = seen.updates.get(name, torch.zeros_like(part)) + part
    if handle is not None:
        assert handle.stats().steps == 4
        owed = residuals_of(handle, comm.rank)
        seen.residuals = {name.removeprefix("inner."): part for name, part in owed.items()}
        handle.close()
    return seen


def test_reentrant_checkpointing(run_on: Any) -> None:
    plain = run_on(2, partial(train_reentrant, scheme=None))
    full = run_on(2, partial(train_reentrant, scheme="topk", density=1.0))
    for mine, theirs in zip(full, plain, strict=True):
        for update, reference in zip(mine.every_update, theirs.every_update, strict=True):
            assert all(torch.equal(update[name], reference[name]) for name in reference)
    ranks = run_on(2, partial(train_reentrant, scheme="topk"))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(2, passes=4))


def train_uneven(comm: Communicator, wrap: dict[str, Any], scheme: str | Scheme) -> Trained:
    """Rank 0 has two inputs, the others have four."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS, **wrap)
    handle = attach_evenly(ddp, scheme)
    seen = Trained()
    with ddp.join():
        for step in range(2 if comm.rank == 0 else 4):
            ddp.zero_grad()
            ddp(comm.rank, step).backward()
            for name, part in observe(ddp).items():
                seen.updates[name] = seen.updates.get(name, torch.zeros_like(part)) + part
    assert handle.stats().steps == 4
    seen.residuals = residuals_of(handle, comm.rank)
    handle.close()
    return seen


def join_by_those_left(comm: Communicator) -> None:
    for scheme in ("topk", "dense"):
        ddp = DistributedDataParallel(Linear())
        handle = attach_evenly(ddp, scheme)
        ddp(comm.rank, 0).backward()
        with (
            pytest.raises(InputError, match="sparcel averages over all ranks"),
            ddp.join(divide_by_initial_world_size=False),
        ):
            ddp(comm.rank, 1).backward()
        handle.close()


def test_averages_over_the_ranks_with_data_are_refused(run_on: Any) -> None:
    run_on(2, join_by_those_left)


@pytest.mark.parametrize(
    ("world_size", "scheme", "wrap"),
    [
        (3, "topk", {}),
        (3, "scalecom", {"find_unused_parameters": True}),
        (4, Hierarchical(OkTopK(), 2), {}),
    ],
    ids=["topk", "scalecom, unused", "oktopk between nodes"],
)
def test_ranks_that_run_out_of_data_keep_up(
    run_on: Any, wrap: dict[str, Any], world_size: int, scheme: str | Scheme
) -> None:
    ranks = run_on(world_size, train_uneven, wrap, scheme)
    gradients = {
        name: sum(
            known_gradient(name, parameter, rank, step).double().flatten()
            for rank in range(world_size)
            for step in range(2 if rank == 0 else 4)
        )
        for name, parameter in Linear().named_parameters()
    }
    assert_conserved(ranks[1:] + ranks[:1], gradients, exact=False)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(40, 40, bias=False)
        self.decode = nn.Linear(40, 40, bias=False)
        self.decode.weight = self.encode.weight
        nn.init.eye_(self.encode.weight)

    def forward(self, rank: int) -> Tensor:
        data = (torch.arange(80).view(2, 40) * (rank + 3) % 5 - 2).float()
        return self.decode(self.encode(data)).sum()


def train_tied(comm: Communicator, scheme: str | None, **settings: Any) -> dict[str, Any]:
    ddp = DistributedDataParallel(Tied())
    handle = None if scheme is None else attach_evenly(ddp, scheme, **settings)
    ddp(comm.rank).backward()
    residuals = {} if handle is None else residuals_of(handle, comm.rank)
    if handle is not None:
        handle.close()
    return {"update": observe(ddp)["encode.weight"], "residuals": residuals}


def test_shared_parameters(run_on: Any) -> None:
    plain = run_on(2, partial(train_tied, scheme=None))
    full = run_on(2, partial(train_tied, scheme="topk", density=1.0))
    sparse = run_on(2, partial(train_tied, scheme="topk"))
    assert all(torch.equal(a["update"], b["update"]) for a, b in zip(plain, full, strict=True))
    owed = [result["residuals"] for result in sparse]
    assert all(set(residuals) == {"encode.weight"} for residuals in owed)
    total = 2 * sparse[0]["update"] + sum(residuals["encode.weight"] for residuals in owed)
    assert torch.equal(total, 2 * plain[0]["update"])


def attach_late(comm: Communicator) -> Trained:
    """Train with plain DDP until its buckets are final, and then with a scheme."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    seen = Trained()
    for step in range(2):
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
    handle = attach_evenly(ddp, "topk")
    for step in range(2, 4):
        for name, part in observe(ddp).items():
            seen.updates[name] = seen.updates.get(name, torch.zeros_like(part))
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
        for name, part in observe(ddp).items():
            seen.updates[name] += part
    seen.residuals = residuals_of(handle, comm.rank)
    handle.close()
    return seen


def test_attached_after_some_steps(run_on: Any) -> None:
    ranks = run_on(2, attach_late)
    all_steps, first_steps = gradient_sums(2, passes=4), gradient_sums(2, passes=2)
    assert_conserved(ranks, {name: all_steps[name] - first_steps[name] for name in all_steps})
