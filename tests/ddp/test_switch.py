"""A DDP model that is trained by a schedule: sparse, dense, sparse and dense again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel import Phase, Schedule
from sparcel.core.comm import Communicator
from sparcel.core.training.residuals import FLUSH_STEPS
from tests.ddp.ahead import are, data_of, linear, looked_into, loss_of
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
from tests.evenly import attach_evenly

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
    handle = attach_evenly(ddp, SCHEDULE.at(0).scheme, optimizer=optimizer)
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
        every.append(Trained(sums, residuals_of(handle, comm.rank), [update]))
    handle.close()
    return every


def test_a_model_is_trained_by_a_schedule_and_loses_nothing(run_on: Any) -> None:
    results = run_on(4, follow)
    for step, ranks in enumerate(zip(*results, strict=True)):
        assert_agreed(list(ranks))
        assert_conserved(list(ranks), gradient_sums(4, step + 1), exact=False)
        assert bool(ranks[0].residuals) != (3 + FLUSH_STEPS <= step + 1 <= 5 + FLUSH_STEPS)


FLUSHING = range(3, 3 + FLUSH_STEPS)
WAYS: dict[str, tuple[dict[str, Any], dict[int, tuple[str, ...]], int]] = {
    "unused": ({"find_unused_parameters": True}, {1: ("second",)}, FLUSHING[-1]),
    "static": ({"static_graph": True}, {}, FLUSHING[-2]),
}
"""How DDP is made, which parameters which ranks leave out in the steps that flush, and the last
step after which a rank owes something."""


def flush_in_part(comm: Communicator, way: str, folder: Path) -> list[Trained]:
    """Return what was seen up to each step, and what a checkpoint of the last that owes holds."""
    wrap, unused, last = WAYS[way]
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS, **wrap)
    handle = attach_evenly(ddp, "topk", density=0.02)
    every: list[Trained] = []
    for step in range(3 + FLUSH_STEPS + 2):
        if step == 3:
            handle.switch("dense")
        ddp.zero_grad()
        ddp(comm.rank, step, unused.get(comm.rank, ()) if step in FLUSHING else ()).backward()
        before = every[-1].updates if every else {}
        update = observe(ddp)
        sums = {name: part + before.get(name, 0) for name, part in update.items()}
        every.append(Trained(sums, residuals_of(handle, comm.rank), [update]))
        if step == last:
            dcp.save({"sparcel": handle.state_dict()}, checkpoint_id=folder)
    handle.close()
    handle = attach_evenly(DistributedDataParallel(Linear()), "topk")
    state = handle.state_dict()
    dcp.load({"sparcel": state}, checkpoint_id=folder)
    handle.load_state_dict(state)
    handle.switch("dense")
    every.append(Trained({}, residuals_of(handle, comm.rank)))
    handle.close()
    return every


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_does_not_use_a_parameter_flushes_it_later(
    run_on: Any, tmp_path: Path, way: str
) -> None:
    _, unused, last = WAYS[way]
    *steps, loaded = zip(*run_on(2, flush_in_part, way, tmp_path), strict=True)
    for step, ranks in enumerate(steps):
        assert_agreed(list(ranks))
        sums = gradient_sums(2, step + 1, None, unused, FLUSHING)
        assert_conserved(list(ranks), sums, exact=False)
        assert all(bool(one.residuals) == (step <= last) for one in ranks)
    for mine, saved in zip(loaded, steps[last], strict=True):
        for name, owed in saved.residuals.items():
            assert torch.equal(mine.residuals[name], owed)


def sparse_later(comm: Communicator) -> bool:
    """Return whether a forward pass computes with moved values before and after a switch."""
    ddp = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach_evenly(ddp, "dense")
    moved = []
    for step, scheme in enumerate(("dense", "topk", "topk")):
        if step:
            handle.switch(scheme, density=0.01)
        optimizer.zero_grad()
        data = data_of(comm.rank, step, ddp.module)
        output, there = looked_into(ddp, data)
        moved.append(not are(ddp.module, there))
        loss_of(output, data).backward()
        optimizer.step()
    handle.close()
    return moved == [False, False, True]


def test_a_model_that_was_dense_is_ahead_once_it_is_sparse(run_on: Any) -> None:
    assert run_on(2, sparse_later) == [True, True]
