"""Islands of unequal speed: outer steps by the clock, and averages by what islands learn from."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.errors import InputError, SparcelWarning
from sparcel.products.outer import diloco, streaming
from sparcel.products.outer.method import Pace, Weights, default
from tests.outer.islands import Training, same

PLAIN = diloco(lr=1.0, momentum=0.0)
"""What is shared becomes the mean of what islands have."""


class Clock(threading.local):
    """A time that each island lets pass for itself."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("fragments", [1, 2])
def test_islands_of_unequal_speed_come_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, fragments: int
) -> None:
    clock = Clock()
    monkeypatch.setattr("sparcel.products.outer.method.time", clock)
    method = replace(PLAIN, fragments=fragments)

    def on_rank(comm: Communicator) -> Any:
        clock.now = 0.0
        island = Training(comm, comm.rank, method, every="12s")
        while island.outer.steps < 4:
            clock.now += comm.rank + 1
            island.step()
        return island.done, clock.now, island.shared()

    results = simulate(3, on_rank).results
    seconds = 48.0 / fragments
    assert [found[:2] for found in results] == [(seconds / (n + 1), seconds) for n in range(3)]
    assert all(same(found[2], results[0][2]) for found in results)


@pytest.mark.parametrize("every", ["60", "60 min", "s", "0s", "1..2s", ".s", "nans", 0, 1.5])
def test_what_is_no_pace_is_refused(every: Any) -> None:
    with pytest.raises(InputError, match="every"):
        Pace(every, 1, 0)


@given(every=st.integers(1, 9), fragments=st.integers(1, 4), steps=st.integers(0, 9))
def test_an_outer_step_is_due_once_its_share_of_inner_steps_is_done(
    every: int, fragments: int, steps: int
) -> None:
    pace = Pace(every, fragments, 0)
    for clock in range(every * (steps + 2)):
        assert pace.is_due(clock, steps) == (clock * fragments >= (steps + 1) * every)


Amounts = list[float | None]
"""What the islands tell in each inner step; None for nothing."""

AMOUNT = st.none() | st.sampled_from([0.0, 1.0, 2.0, 5.0, 1e9])


@pytest.mark.filterwarnings("ignore::sparcel.errors.SparcelWarning")
@pytest.mark.parametrize("method", [PLAIN, replace(default(), lr=1.0, momentum=0.0)], ids=str)
@given(
    amounts=st.lists(AMOUNT, min_size=3, max_size=3),
    bad=st.none() | st.integers(0, 2),
)
@settings(max_examples=12)
def test_each_island_counts_by_what_it_has_learned_from(
    method: Any, amounts: Amounts, bad: int | None
) -> None:
    """Their weighted mean is shared or owed; memory counts as it is."""

    def on_rank(comm: Communicator) -> Any:
        island = Training(comm, comm.rank, method, every=2)
        found = []
        for turn in range(2):
            shared, memory = island.shared(), island.memory()
            for step in range(2):
                if (amount := amounts[comm.rank]) is not None:
                    island.outer.count(amount)
                island.step(math.nan if (comm.rank, turn, step) == (bad, 1, 1) else None)
            found.append([shared, memory, island.before, island.shared(), island.memory()])
        return found

    by_island = simulate(3, on_rank).results
    for turn in range(2):
        counting = [rank for rank in range(3) if turn == 0 or rank != bad]
        told = [amounts[rank] for rank in counting]
        total = sum(1.0 if one is None else one for one in told)
        alike = None in told or not total
        for tensor in by_island[0][0][0]:
            ins = outs = torch.zeros(())
            for rank, parts in enumerate(by_island):
                shared, memory, local, after, kept = (part[tensor].double() for part in parts[turn])
                ins = ins + memory
                outs = outs + shared - after + kept
                if rank in counting:
                    weight = 1 / len(counting) if alike else (amounts[rank] or 0.0) / total
                    ins = ins + 3 * weight * (shared - local)
            torch.testing.assert_close(outs, ins, rtol=0, atol=5e-5)


def test_islands_that_do_not_all_tell_count_alike_with_a_warning() -> None:
    def on_rank(comm: Communicator) -> None:
        island = Training(comm, comm.rank, PLAIN, every=1)
        if comm.rank:
            island.outer.count(5)
            with pytest.warns(SparcelWarning, match="all count alike"):
                island.step()
        else:
            island.step()

    simulate(2, on_rank)


def test_fragments_count_what_was_learned_since_each_was_exchanged() -> None:
    weights = Weights(2)
    assert math.isnan(weights.move(0))
    for number in range(1, 5):
        weights.count(number)
        beside = 0.5 * min(number - 1, 2)
        assert weights.move(number % 2) == sum(range(max(1, number - 1), number + 1)) + beside
        weights.count(0.5)  # beside the exchange
        weights.step(number % 2)
    restored = Weights(2)
    restored.state = weights.state
    assert [restored.move(0), restored.move(1)] == [0.5, 5.0]
    restored.forget()
    assert [restored.move(0), restored.move(1)] == [0.0, 0.0]
    with pytest.raises(InputError, match="learned from"):
        weights.count(-1)


@given(stop=st.integers(0, 9))
@settings(max_examples=6)
def test_training_resumes_with_what_was_counted(stop: int) -> None:
    def on_rank(comm: Communicator) -> None:
        def go_on(island: Training, until: int) -> Training:
            while island.done < until:
                island.outer.count(1 + comm.rank * island.done)
                island.step()
            return island

        def made() -> Training:
            return Training(comm, comm.rank, streaming(2, 1), every=4)

        through = go_on(made(), stop)
        resumed = made()
        resumed.model.load_state_dict(through.model.state_dict())
        resumed.outer.load_state_dict(through.outer.state_dict())
        resumed.done = stop
        assert same(go_on(through, 12).local(), go_on(resumed, 12).local())

    simulate(3, on_rank)
