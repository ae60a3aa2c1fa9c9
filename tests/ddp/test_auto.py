"""attach(model, "auto") tells its choices, and costs as much as dense if it chose dense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.core.cost import stated_rates
from sparcel.core.schemes import Auto
from sparcel.core.schemes.auto import CANDIDATES
from tests.ddp.models import (
    LARGE,
    MANY_BUCKETS,
    Linear,
    Trained,
    assert_agreed,
    assert_conserved,
    gradient_sums,
    train,
)
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes


@contextmanager
def bandwidth_of(comm: Communicator, bytes_a_second: float) -> Iterator[None]:
    comm.rates = stated_rates(bandwidth=bytes_a_second, latency_s=1e-6, ranks=comm.size)
    yield
    comm.rates = None


def choose(comm: Communicator, bandwidth: float) -> tuple[dict[str, str], dict[str, str]]:
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    with bandwidth_of(comm, bandwidth):
        handle = attach_evenly(ddp, "auto", density=0.02, group=comm)
        before = handle.chosen
        for step in range(3):
            ddp(comm.rank, step).backward()
        handle.close()
    return before, handle.chosen


def test_the_handle_tells_the_method_of_each_parameter(run_on: Any) -> None:
    for before, after in run_on(4, choose, 1e6):
        assert before == {}
        assert set(after) == set(LARGE)
        assert set(after.values()) <= {"topk", "gtopk", "oktopk"}
    for _, after in run_on(4, choose, 1e13):
        assert after == dict.fromkeys(LARGE, "dense")


def train_in_turns(comm: Communicator) -> tuple[Trained, set[str | None]]:
    """Predict anew in each step, so that every method is chosen in turn."""
    methods: set[str | None] = set()
    choose = Auto._choose

    def choose_anew(self: Auto, *step: Any) -> None:
        self._terms = ()
        choose(self, *step)
        methods.add(self.chosen)

    def predict(self: Auto, *_: Any) -> dict[str, float]:
        following = CANDIDATES[7 * (self.steps + 1) % 9 % 4]
        return {name: float(name != following) for name in CANDIDATES}

    with patch.object(Auto, "_choose", choose_anew), patch.object(Auto, "_predict", predict):
        wrap = {**MANY_BUCKETS, "find_unused_parameters": True}
        unused = {0: ["second"], 3: ["second", "first"]}
        trained = train(
            comm, "auto", steps=12, density=0.05, wrap=wrap, unused=unused, unused_in=[3, 4, 8]
        )
    return trained, methods


def test_nothing_is_lost_in_any_sequence_of_choices(run_on: Any) -> None:
    results = run_on(4, train_in_turns)
    ranks = [trained for trained, _ in results]
    assert_agreed(ranks)
    unused = {0: ["second"], 3: ["second", "first"]}
    assert_conserved(ranks, gradient_sums(4, 12, unused=unused, unused_in=[3, 4, 8]))
    assert all(methods == set(CANDIDATES) for _, methods in results)


def traffic_of_a_step(comm: Communicator, scheme: Any, **settings: Any) -> tuple[int, int]:
    """Return the messages and bytes of a late step."""
    counts = []
    for steps in (4, 5):
        stats = train(comm, scheme, steps=steps, wrap=MANY_BUCKETS, **settings).stats
        assert stats is not None
        counts.append((stats.messages_sent, stats.bytes_sent))
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


def both(comm: Communicator) -> list[tuple[int, int]]:
    auto = Auto(candidates=["dense"])
    return [traffic_of_a_step(comm, scheme, frontload=False) for scheme in (auto, "dense")]


def test_dense_steps_send_what_dense_sends_small_tensors_included(run_on: Any) -> None:
    for auto, dense in run_on(4, both):
        assert auto == dense
