"""More is sent in the first steps, unless the scheme warms up: `front_loaded`."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel.core.schemes import (
    Costs,
    Hierarchical,
    Request,
    TopK,
    front_loaded,
    front_loaded_shares,
)
from sparcel.core.schemes.density import count_for
from tests.schemes.steps import integers, memory_of, normal, simulate_nodes, total

densities = st.floats(1e-5, 1)
SIZE = 1000


@given(densities, st.integers(0, 10**6))
def test_the_front_lies_between_density_and_1_and_only_falls(density, step):
    assert density <= front_loaded(density, step + 1) <= front_loaded(density, step) <= 1


@given(densities, st.integers(0, 25), st.data())
def test_the_front_stays_from_one_power_of_two_to_the_next(density, power, data):
    number = data.draw(st.integers(2**power, 2 ** (power + 1) - 1))
    assert front_loaded(density, number - 1) == front_loaded(density, 2**power - 1)
    early = 200 * density / 2**power
    waiting = min(0.1, density + math.sqrt(7 * density / 2**power))
    expected = 1 if early >= 0.25 else max(density, early, waiting)
    assert front_loaded(density, 2**power - 1) == pytest.approx(expected)


@given(densities, st.integers(1, 3000))
def test_what_the_front_costs_in_a_training_is_bounded(density, steps):
    shares = front_loaded_shares(density, steps)
    mean = sum(front_loaded(density, step) for step in range(steps)) / steps
    assert sum(shares.values()) == pytest.approx(1)
    assert sum(one * share for one, share in shares.items()) == pytest.approx(mean)
    assert mean <= density * (1 + 2.5 * math.sqrt(7 / (density * steps)) + 1320 / steps)


def test_the_front_is_as_large_as_its_description_says():
    shown = [round(front_loaded(0.01, step), 2) for step in (14, 15, 100, 1000)]
    assert shown == [1, 0.12, 0.04, 0.02]
    assert [round(front_loaded(0.1, step), 2) for step in (126, 127, 255)] == [1, 0.16, 0.1]


def asked_in(scheme, comm, steps, void=(), front=True, layers=()):
    """Return how many coordinates each step asked for."""
    asked = []
    for step in range(steps):
        costs = Costs()
        gradient = integers(comm.rank, step, SIZE)
        if step in void:
            gradient[0] = math.nan
        request = Request(layers, front_loaded=front, costs=costs)
        scheme.step(gradient, comm, request=request)
        asked.append(costs.asked)
    return asked


BY_NAME = {
    **{name: {} for name in ("topk", "sparcml", "gtopk", "oktopk", "scalecom", "mstopk", "dgc")},
    "auto": {"candidates": ["gtopk"]},
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_scheme_asks_for_what_the_front_says_of_each_step_that_took_effect(name):
    def on_rank(comm):
        return asked_in(sparcel.scheme(name, density=0.001, **BY_NAME[name]), comm, 10, void=[4])

    numbers = [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    expected = [count_for(front_loaded(0.001, number), SIZE) for number in numbers]
    assert len(set(expected)) == 4
    assert simulate_nodes(2, on_rank).results == [expected] * 2


def test_the_front_holds_between_nodes_and_nothing_is_lost():
    def on_rank(comm):
        scheme, updates = Hierarchical(TopK(0.01)), []
        for step in range(4):
            request = Request(front_loaded=True)
            updates.append(scheme.step(integers(comm.rank, step, SIZE), comm, request=request))
        fresh = Hierarchical(TopK(0.01))
        return updates, memory_of(scheme), asked_in(fresh, comm, 4)

    results = simulate_nodes(4, on_rank).results
    came_out = 4 * total(results[0][0]) + total(owed for _, owed, _ in results)
    went_in = total(integers(rank, step, SIZE) for rank in range(4) for step in range(4))
    assert torch.equal(came_out, went_in)
    for *_, asked in results:  # each rank selects from its node's half of the vector
        assert asked == [count_for(front_loaded(0.01, step), SIZE // 2) for step in range(4)]


@pytest.mark.parametrize("name", ["topk", "oktopk", "scalecom", "auto"])
def test_a_warm_up_switches_the_front_off(name):
    def on_rank(comm):
        settings = {"density": 0.01, **BY_NAME[name]}
        warm = {**settings, "warmup": [0.25, 0.05], "warmup_steps": 2}
        plain = asked_in(sparcel.scheme(name, **settings), comm, 4, front=False)
        return plain, asked_in(sparcel.scheme(name, **warm), comm, 6)

    for plain, warmed in simulate_nodes(2, on_rank).results:
        assert plain == [10] * 4
        assert warmed == [250, 250, 50, 50, 10, 10]


@given(own=densities, density=st.floats(1e-3, 0.5), cut=st.integers(1, SIZE - 1))
def test_layers_are_front_loaded_by_their_own_densities(own, density, cut):
    layers = [(0, cut, own), (cut, SIZE, None)]

    def on_rank(comm):
        return asked_in(TopK(density), comm, 5, layers=layers)

    expected = [
        count_for(front_loaded(own, step), cut) + count_for(front_loaded(density, step), SIZE - cut)
        for step in range(5)
    ]
    assert simulate_nodes(1, on_rank).results == [expected]


def test_the_selection_itself_has_the_size_that_was_asked_for():
    layers = [(0, 400, 0.002), (400, SIZE, None)]

    def on_rank(comm):
        scheme, counts = TopK(0.001), []
        for step in range(9):
            request = Request(layers, front_loaded=True)
            update = scheme.step(normal(comm.rank, step, SIZE), comm, request=request)
            counts.append([int(update[lo:hi].count_nonzero()) for lo, hi, _ in layers])
        return counts

    expected = [
        [count_for(front_loaded(own, step), size) for own, size in ((0.002, 400), (0.001, 600))]
        for step in range(9)
    ]
    assert simulate_nodes(1, on_rank).results == [expected]


def test_reused_thresholds_follow_the_front():
    """The update's count matches the density in every step that changes the density."""

    def on_rank(comm):
        scheme, counts = sparcel.scheme("oktopk", density=0.001, threshold="reuse"), []
        for step in range(16):
            costs = Costs()
            request = Request(front_loaded=True, costs=costs)
            scheme.step(normal(comm.rank, step, 2000), comm, request=request)
            counts.append((costs.asked, costs.reduced))
        return counts

    counts = simulate_nodes(4, on_rank).results[0]
    changed = [0, *(after for after in range(1, 16) if counts[after][0] != counts[after - 1][0])]
    assert changed == [0, 1, 3, 7, 15]
    assert all(asked == reduced for asked, reduced in (counts[step] for step in changed))
    assert all(later[0] <= earlier[0] for earlier, later in pairwise(counts))


@pytest.mark.parametrize("name", ["topk", "bidirectional"])
def test_a_density_that_changes_is_that_of_the_next_step(name):
    def program(comm):
        scheme, sent = sparcel.scheme(name, density=0.01), []
        for density in (0.01, 0.2, 0.01):
            scheme.density, costs = density, Costs()
            scheme.step(torch.randn(2000), comm, request=Request(costs=costs))
            sent.append(costs.asked)
        return sent

    for few, many, again in sparcel.simulate(2, program).results:
        assert few == again
        assert many > 10 * few
