"""A DDP model that is trained by a schedule: sparse, dense, sparse and dense again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel import Phase, Schedule
from sparcel.comm import Communicator
from sparcel.training.flush import FLUSH_STEPS
from tests.ddp.ahead import data_of, linear, loss_of, now
from tests.ddp.models import (
    MANY_BUCKETS,
    Linear,
    Trained,
    assert_agreed,
    assert_conserved,
    gradient_sums,
    observe,
    residuals_of,
)

pytestmark = pytest.mark.processes

SCHEDULE = Schedule(
    Phase(3, sparcel.scheme("hitopk", density=0.02, ranks_per_node=2), lr=0.1),
    Phase(FLUSH_STEPS + 2, sparcel.scheme("torus2d", ranks_per_node=2), lr=(0.1, 0.2)),
    Phase(2, sparcel.scheme("scalecom", density=0.02, beta=0.5), lr=0.2),
    Phase(2, "dense", lr=0.2),
)


def follow(comm: Communicator) -> list[Trained]:
    """Return what was seen up to each step."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, momentum=0.5)
    handle = sparcel.attach(ddp, SCHEDULE.at(0).scheme, optimizer=optimizer)
    every: list[Trained] = []
    for step in range(int(SCHEDULE.length)):
        SCHEDULE.apply(step, handle, optimizer)
        assert optimizer.param_groups[0]["lr"] == SCHEDULE.lr(step)
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
        update = observe(ddp)
        optimizer.step()
        before = every[-1].updates if every else {}
        sums = {name: part + before.get(name, 0) for name, part in update.items()}
        beta = 0.5 if "ScaleCom" in repr(handle.scheme) else 1.0
        owed = {name: part / beta for name, part in residuals_of(handle, comm.rank).items()}
        every.append(Trained(sums, owed, [update]))
    handle.close()
    return every


def test_a_model_is_trained_by_a_schedule_and_loses_nothing(run_on: Any) -> None:
    results = run_on(4, follow)
    for step, ranks in enumerate(zip(*results, strict=True)):
        assert_agreed(list(ranks))
        assert_conserved(list(ranks), gradient_sums(4, step + 1), exact=False)
        assert bool(ranks[0].residuals) != (3 + FLUSH_STEPS <= step + 1 <= 5 + FLUSH_STEPS)


def sparse_later(comm: Communicator) -> bool:
    """Return whether parameters are ahead in a forward pass, before and after a switch."""
    ddp = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = sparcel.attach(ddp, "dense")
    moved = []
    for step, scheme in enumerate(("dense", "topk", "topk")):
        if step:
            handle.switch(scheme, density=0.01)
        optimizer.zero_grad()
        before = now(ddp.module)
        data = data_of(comm.rank, step, ddp.module)
        loss = loss_of(ddp(data), data)
        ahead = {name: one.detach().clone() for name, one in ddp.module.named_parameters()}
        moved.append(any(not torch.equal(ahead[name], before[name]) for name in before))
        loss.backward()
        optimizer.step()
    handle.close()
    return moved == [False, False, True]


def test_a_model_that_was_dense_is_ahead_once_it_is_sparse(run_on: Any) -> None:
    assert run_on(2, sparse_later) == [True, True]
