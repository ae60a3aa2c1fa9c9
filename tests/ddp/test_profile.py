"""What a profile of training shows of sparcel."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from sparcel.core.comm import Communicator
from tests.ddp.models import MANY_BUCKETS, Linear
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes


def ranges_of_a_step(comm: Communicator, all_threads: bool) -> dict[str, set[int]]:
    """Return the threads on which each of sparcel's ranges was recorded, by name."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    handle = attach_evenly(ddp, "topk")
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    for step in range(2):
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiled:
            ddp(comm.rank, step).backward()
    handle.close()
    found: dict[str, set[int]] = {}
    for event in profiled.events() or ():
        if event.name.startswith("sparcel::"):
            found.setdefault(event.name, set()).add(event.thread)
    return found


def test_a_profile_of_all_threads_shows_the_overlap(run_on: Any) -> None:
    for found in run_on(2, ranges_of_a_step, True):
        exchanging = {"sparcel::select", "sparcel::exchange", "sparcel::update"}
        assert set(found) == {"sparcel::wait", *exchanging}
        assert all(found[name].isdisjoint(found["sparcel::wait"]) for name in exchanging)


def test_a_profile_of_the_training_thread_shows_the_wait(run_on: Any) -> None:
    for found in run_on(2, ranges_of_a_step, False):
        assert set(found) == {"sparcel::wait"}
