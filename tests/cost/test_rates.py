"""Rates: curves, JSON, and predictions from them."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import simulate
from sparcel.core import cost
from sparcel.core.cost import (
    COLLECTIVES,
    STEPS,
    SUMS,
    Curve,
    Problem,
    Rates,
    default_rates,
    measure,
    predict,
    stated_rates,
)
from sparcel.core.cost.defaults import KINDS
from sparcel.core.cost.steps import engine_sum
from sparcel.core.rates import WORK
from sparcel.errors import InputError
from sparcel.tools.bench.timing import formula_of

RECORD = Path(__file__).parents[2] / "benchmarks/results/planner_fit.json"

amounts = st.floats(0, 1e9)
curves = st.builds(
    lambda points: Curve(tuple(sorted(points.items()))),
    st.dictionaries(st.integers(0, 10**6).map(float), st.floats(0, 10), min_size=1, max_size=6),
)
problems = st.builds(
    lambda size, share, ranks, here: Problem(size, max(1, size // share), ranks * here, here),
    st.integers(1, 10**7),
    st.integers(1, 2000),
    st.integers(1, 20),
    st.sampled_from([1, 1, 2, 8]),
)
ROWS = (*COLLECTIVES, "auto", *(f"step:{name}" for name in STEPS))
names = st.sampled_from([*ROWS, "dense fp32", "dense bf16"])


def predicted(name, problem, rates=None):
    """Return the prediction for a name of the benchmark's rows."""
    rates = rates or default_rates()
    return predict(formula_of(name), problem, rates)


def fastest_step(schemes, problem, rates):
    return cost.choose({name: STEPS[name] for name in schemes}, problem, rates)


@given(curves, amounts, amounts)
def test_larger_amounts_never_take_less_time(curve, some, more):
    low, high = sorted([some, more])
    assert curve(low) <= curve(high) + 1e-12


@given(curves)
def test_curve_stays_between_measured_times(curve):
    times = [seconds for _, seconds in curve.points]
    assert all(
        min(times) - 1e-9 <= curve(amount) <= max(times) + 1e-9 for amount, _ in curve.points
    )


def test_curve_goes_through_rising_points_and_is_extrapolated():
    curve = Curve(((0.0, 1.0), (10.0, 2.0), (20.0, 4.0)))
    assert [curve(x) for x in (0, 5, 10, 15, 20, 30)] == [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert curve.slower(3)(10) == 4.0
    assert Curve(((8.0, 2.0),))(16) == 4.0


def test_curve_smooths_decreasing_times():
    curve = Curve(((1.0, 3.0), (2.0, 1.0), (3.0, 5.0)))
    assert curve.points == ((1.0, 2.0), (2.0, 2.0), (3.0, 5.0))


@pytest.mark.parametrize("points", [(), ((2.0, 1.0), (1.0, 1.0)), ((1.0, float("nan")),)])
def test_a_curve_needs_points_in_order(points):
    with pytest.raises(InputError, match="a curve"):
        Curve(points)


@given(st.dictionaries(st.sampled_from(sorted(default_rates().curves)), curves), st.floats(1, 9))
def test_rates_round_trip_through_json(some, crowding):
    rates = Rates({**default_rates().curves, **some}, 5, 5, crowding, description="here")
    again = Rates.from_json(rates.to_json())
    assert again.to_json() == rates.to_json()
    assert dict(again.curves) == dict(rates.curves)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"curves": {}, "ranks": 2}'])
def test_from_json_refuses_other_text(text):
    with pytest.raises(InputError, match="rates"):
        Rates.from_json(text)


def test_every_kind_of_work_is_described():
    assert tuple(KINDS) == WORK


def test_rates_that_older_versions_measured_are_read():
    recorded = json.loads(RECORD.read_text())["networks"][0]["rates"]["gloo"]
    assert "histogram" in recorded["curves"]
    rates = Rates.from_json(json.dumps(recorded))
    assert "histogram" not in rates.curves
    assert rates["merge"].points == tuple(map(tuple, recorded["curves"]["merge"]))
    recorded["curves"]["nonsense"] = recorded["curves"]["merge"]
    with pytest.raises(InputError, match="curve cannot be"):
        Rates.from_json(json.dumps(recorded))


@given(names, problems)
def test_seconds_are_the_sum_of_the_phases(name, problem):
    found = predicted(name, problem)
    parts = found.select + found.encode + found.exchange + found.reduce
    assert found.seconds == pytest.approx(parts)
    assert min(found.select, found.encode, found.exchange, found.reduce, found.bytes) >= 0


@given(names, problems, st.integers(2, 50))
def test_less_bandwidth_never_makes_anything_faster(name, problem, factor):
    if name in ("step:topk", "step:auto"):  # the rates decide what it does
        return
    slower = predicted(name, problem, default_rates().slower(factor))
    assert slower.seconds >= predicted(name, problem).seconds * (1 - 1e-9)


@given(st.sampled_from(ROWS), st.integers(2, 9), st.integers(1, 3000))
def test_more_coordinates_never_take_fewer_bytes(name, ranks, k):
    if name in ("auto", "step:topk", "step:auto", "oktopk", "step:oktopk"):  # these may change
        return
    if name in ("broadcast", "step:scalecom"):  # down a tree up to 4 KiB, at more bytes in all
        return
    size = 10**6
    few, many = (predicted(name, Problem(size, count, ranks)).bytes for count in (k, 2 * k))
    assert few <= many


@given(problems)
def test_the_choice_is_the_fastest_and_the_first_of_equals(problem):
    chosen = cost.choose(SUMS, problem)
    seconds = {name: predicted(name, problem).seconds for name in SUMS}
    assert chosen == min(seconds, key=seconds.__getitem__)
    assert predicted("auto", problem).seconds == seconds[chosen]


@pytest.mark.parametrize("name", ["auto", "step:auto", "step:topk"])
def test_auto_chooses_without_knowing_the_indices(name):
    blind = Problem(10**6, 10**5, 8)
    same = replace(blind, spread=blind.k)  # all ranks send the same coordinates
    assert predicted(name, same).rounds == predicted(name, blind).rounds


def test_dense_wins_where_links_are_fast_and_sparse_where_they_are_slow():
    problem = Problem(1 << 24, 1 << 20, 8)
    fast = stated_rates(bandwidth=1e12, latency_s=1e-7, ranks=8)
    slow = stated_rates(bandwidth=1e8, latency_s=1e-4, ranks=8)
    schemes = ("dense", "topk", "oktopk")
    assert fastest_step(schemes, problem, fast) == "dense"
    assert fastest_step(schemes, problem, slow) == "oktopk"


def test_summing_inside_nodes_first_is_predicted_to_be_faster():
    rates = stated_rates(bandwidth=1e8, latency_s=1e-4, ranks=32, ranks_per_node=8)
    problem = Problem(1 << 24, 1 << 17, 32, 8)
    assert fastest_step(("topk", "hitopk", "torus2d"), problem, rates) == "hitopk"


def test_sums_of_groups_share_the_links_of_their_nodes():
    rates = stated_rates(bandwidth=1e8, latency_s=0, ranks=32, ranks_per_node=8)
    problem = Problem(1 << 24, 1 << 24, 32, 8)
    across = 2 * 3 / 4 * 4 * problem.size / 1e8  # eight rings of four nodes, an eighth each
    assert predicted("step:torus2d", problem, rates).exchange > across
    shard = Problem(problem.size // 8, problem.size // 8, 4)
    sums = engine_sum(4)
    assert predict(sums, shard, rates.across_nodes()).exchange == pytest.approx(across)
    assert predict(sums, shard, rates).exchange == pytest.approx(across / 8)  # alone on the links


def test_short_work_takes_turns_on_crowded_cores():
    module = sys.modules["sparcel.core.cost.measure"]  # the package has the function of that name
    samples = {1: [(2e-3, 1e-3)]}
    work, message = (module._Timed(name, [1], None, samples) for name in ("merge", "shift"))
    assert (work.curve(3.5)(1), work.curve(1.0)(1)) == (3.5e-3, 2e-3)
    assert message.curve(3.5)(1) == 2e-3


@pytest.mark.parametrize(("clock", "crowding"), [(3e-3, 3.0), (5e-4, 1.0)])
def test_crowding_is_the_time_for_each_second_of_the_processor(monkeypatch, clock, crowding):
    module = sys.modules["sparcel.core.cost.measure"]
    monkeypatch.setattr(module, "_times", lambda comm, trial, count: [(clock, 1e-3)] * count)
    assert module._crowding(SimpleNamespace(size=2), 4) == pytest.approx(crowding)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"k": 11}, "k must be at most the size, 10, got 11"),
        ({"spread": 1}, r"spread must lie in \[2, 10\], got 1"),
    ],
)
def test_a_problem_is_checked(fields, words):
    with pytest.raises(InputError, match=words):
        Problem(**{"size": 10, "k": 2, "ranks": 2, **fields})


def test_choose_refuses_no_candidates():
    with pytest.raises(InputError, match="candidate"):
        cost.choose({}, Problem(10, 2, 2))


@pytest.mark.parametrize(("ranks", "here"), [(2, 1), (3, 1), (4, 2)])
def test_all_ranks_measure_the_same(monkeypatch, ranks, here):
    module = sys.modules["sparcel.core.cost.measure"]  # the package has the function of that name
    for name in ("_MESSAGES", "_FLOATS"):
        monkeypatch.setattr(module, name, (64, 1024))
    few = {name: replace(kind, amounts=(64, 1024)) for name, kind in KINDS.items()}
    monkeypatch.setattr(module, "KINDS", few)
    monkeypatch.setattr(module, "_LOOP_SECONDS", 0.0)
    found = simulate(ranks, measure, ranks_per_node=here).results
    assert len({rates.to_json() for rates in found}) == 1
    assert (found[0].ranks, found[0].ranks_per_node) == (ranks, here)
    assert ("node.shift" in found[0].curves) == (here > 1)
    assert predicted("step:oktopk", Problem(10**6, 10**4, ranks, here), found[0]).seconds > 0


def test_only_messages_on_the_cpu_are_measured():
    comm = SimpleNamespace(device=torch.device("cuda", 1), size=2, carrier="NCCL")
    with pytest.raises(InputError, match="over NCCL, whose messages are on cuda:1"):
        measure(comm)


def test_measure_refuses_a_single_rank():
    with pytest.raises(InputError, match="at least 2 ranks, got 1"):
        simulate(1, measure)
