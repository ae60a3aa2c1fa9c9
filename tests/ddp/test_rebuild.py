"""DDP rebuilds its buckets once, and a rank that fails around that time is named."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.errors import CommunicationError
from tests.ddp.models import LARGE, MANY_BUCKETS, Linear, residuals_of
from tests.evenly import attach_evenly
from tests.workers import run_apart

pytestmark = pytest.mark.processes


def see_meetings(comm: Communicator, wrap: dict[str, Any]) -> list[list[Any]]:
    """Return what happens at the start of four forward passes.

    The model's own code is "model". A wait for all ranks is whether DDP has rebuilt its buckets.
    """
    module, seen = Linear(), []
    module.register_forward_pre_hook(lambda *_: seen[-1].append("model"))
    ddp = DistributedDataParallel(module, **MANY_BUCKETS, **wrap)
    handle = attach_evenly(ddp, "topk")
    meet = handle.meet

    def watched() -> None:
        meet()
        seen[-1].append(ddp._has_rebuilt_buckets)

    handle.meet = watched  # type: ignore[method-assign]
    for step in range(4):
        with torch.no_grad():  # DDP rebuilds nothing in such a pass
            seen.append([])
            ddp(comm.rank, step)
            assert seen.pop() == ["model"]
        seen.append([])
        ddp(comm.rank, step).backward()
    handle.close()
    return seen


WAITED = [False, True, "model"]


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        ({}, [["model"], WAITED, ["model"], ["model"]]),
        ({"static_graph": True}, [["model"], ["model"], WAITED, ["model"]]),
        ({"find_unused_parameters": True}, [["model"]] * 4),
    ],
    ids=["dynamic", "static", "unused"],
)
def test_ranks_wait_before_and_after_the_rebuild_and_never_else(
    run_on: Any, wrap: dict[str, Any], expected: list[list[Any]]
) -> None:
    assert run_on(2, partial(see_meetings, wrap=wrap)) == [expected] * 2


def die(comm: Communicator, static: bool) -> tuple[Any, ...]:
    """Kill rank 0 before the pass in which DDP rebuilds its buckets; return what others see."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS, static_graph=static)
    handle = attach_evenly(ddp, "topk")
    for step in range(1 + static):
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    before = residuals_of(handle, comm.rank)
    with pytest.raises(Exception) as raised:  # noqa: PT011  # the test checks the type
        ddp(comm.rank, 2)
    return raised.value, before, residuals_of(handle, comm.rank)


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_survivors_of_a_rank_that_died_before_the_rebuild_name_it(static: bool) -> None:
    outcomes = run_apart(3, die, static, timeout=30)
    assert outcomes.pop(0).died == -signal.SIGKILL
    for outcome in outcomes:
        error, before, after = outcome.result
        assert type(error) is CommunicationError
        assert "rank 0" in str(error)
        assert all(torch.equal(before[name], after[name]) for name in LARGE)
