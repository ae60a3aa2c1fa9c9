"""attach(model, "auto") trains, tells its choices, and costs as much as dense if it chose dense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from sparcel.comm import Communicator
from sparcel.cost import stated_rates
from sparcel.schemes import Auto
from sparcel.schemes import _contest as contest
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
        handle = attach_evenly(ddp, "auto", density=0.02, corrected=False, group=comm)
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


def train_in_short_windows(comm: Communicator) -> tuple[Trained, set[str | None]]:
    """Fake the measured times so that every method is chosen in turn."""
    took = iter([9, 8, 7, 6, 5, 4, 3, 2, 1] * 100)
    methods: set[str | None] = set()

    def decide(self: contest.Contest, seconds: float) -> None:
        self.chosen = ("dense", "topk", "gtopk", "oktopk")[next(took) % 4]
        methods.add(self.chosen)
        self.left = 1

    with patch.object(contest.Contest, "decide", decide):
        wrap = {**MANY_BUCKETS, "find_unused_parameters": True}
        unused = {0: ["second"], 3: ["second", "first"]}
        trained = train(
            comm, "auto", steps=12, density=0.05, wrap=wrap, unused=unused, unused_in=[3, 4, 8]
        )
    return trained, methods


def test_nothing_is_lost_in_any_sequence_of_choices(run_on: Any) -> None:
    results = run_on(4, train_in_short_windows)
    ranks = [trained for trained, _ in results]
    assert_agreed(ranks)
    unused = {0: ["second"], 3: ["second", "first"]}
    assert_conserved(ranks, gradient_sums(4, 12, unused=unused, unused_in=[3, 4, 8]))
    assert all(methods == {"dense", "topk", "gtopk", "oktopk"} for _, methods in results)


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


class Classifier(torch.nn.Module):
    """Two layers; they learn which half of the inputs is larger."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(inputs)))
        return result


def learn(comm: Communicator) -> tuple[float, float, list[torch.Tensor]]:
    ddp = DistributedDataParallel(Classifier())
    handle = attach_evenly(ddp, "auto", density=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(comm.rank)
    losses = []
    for _ in range(150):
        inputs = torch.randn(64, 64, generator=generator)
        labels = (inputs[:, :32].sum(1) > inputs[:, 32:].sum(1)).long()
        loss = torch.nn.functional.cross_entropy(ddp(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    handle.close()
    return losses[0], sum(losses[-10:]) / 10, [p.detach().clone() for p in ddp.parameters()]


def test_auto_trains_with_real_clocks(run_on: Any) -> None:
    results = run_on(2, learn)
    for first, last, parameters in results:
        assert last < 0.5 * first
        assert all(map(torch.equal, parameters, results[0][2]))
