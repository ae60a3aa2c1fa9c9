"""Outer steps in a plan: what they take, and when they are advised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.core.cost import STEPS, Problem, count, stated_rates
from sparcel.core.cost.predict import Exchange
from sparcel.core.formats import format_named
from sparcel.errors import InputError
from sparcel.tools.plan import plan
from sparcel.tools.plan.report import assumptions, table, verdict
from sparcel.tools.plan.steps import DENSE, INTERVALS, OUTER, sends_all

SIZE = 10**6


def link(bandwidth, latency_s=1e-6, ranks=8, ranks_per_node=1):
    return stated_rates(
        bandwidth=bandwidth,
        latency_s=latency_s,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        memory_bandwidth=1e12,
    )


LINKS = [link(1e9), link(1e7, 0.05), link(1e8, 1e-4, 16, 4)]


def row_of(rows, method):
    return next(row for row in rows if row.method == method)


@pytest.mark.parametrize(
    ("method", "exchange", "density", "format", "moments"),
    [
        ("outer's default", "bidirectional", 1.0, "packed:4", 1 / 16),
        ("outer sparseloco", "bidirectional", 1 / 64, "packed:2", 0.0),
        ("outer diloco", "dense fp32", 1.0, "raw", 0.0),
    ],
)
def test_an_outer_step_sends_what_its_formula_says_once_every_so_many_steps(
    method, exchange, density, format, moments
):
    rates = link(1e7)
    row = row_of(plan(SIZE, compute_s=0.1, rates=rates, every=8).outer, method)
    formula = {**STEPS, **DENSE}[exchange]
    problem = Problem(SIZE, round(density * SIZE), 8, format=format_named(format))
    counted = count(formula, problem)
    sent = max(counted.bytes_sent, counted.bytes_received)
    whole = Problem(SIZE, SIZE, 8, format=format_named("raw"))
    sent += moments * count(DENSE["dense fp32"], whole).bytes_sent
    assert row.bytes == pytest.approx(sent / 8, rel=1e-6)
    assert (row.density, row.format, row.every) == (density, format_named(format), 8)


def test_sparseloco_s_recipe_sends_fewer_bits_up_than_indices_of_12_bits_take():
    rates = link(1e7)
    row = row_of(plan(SIZE, compute_s=0.1, rates=rates).outer, "outer sparseloco")
    problem = Problem(SIZE, SIZE // 64, 8, format=row.format)
    terms = STEPS["bidirectional"](problem)
    up = next(term for term in terms if isinstance(term, Exchange))
    assert 8 * up.rounds * up.sent / SIZE < 0.17 < (12 + 2) / 64


@given(st.sampled_from(LINKS), st.floats(0, 2), st.integers(1, 300), st.integers(1, 300))
def test_a_longer_interval_never_takes_longer_a_step(rates, compute, every, more):
    few, many = (
        plan(SIZE, compute_s=compute, rates=rates, every=one).outer for one in (every, every + more)
    )
    for row in few:
        longer = row_of(many, row.method)
        assert compute <= longer.step <= row.step
        assert longer.bytes <= row.bytes
        assert longer.exposed == pytest.approx(longer.step - compute)


def test_an_outer_step_is_computation_and_a_share_of_the_exchange():
    row = row_of(plan(SIZE, compute_s=0.1, rates=link(1e6), every=10).outer, "outer diloco")
    assert row.step == pytest.approx(0.1 + 2 * 7 / 8 * 4 * SIZE / 1e6 / 10, rel=1e-3)
    assert row.share == pytest.approx(1 - 0.1 / row.step)


@pytest.mark.parametrize("model", ["resnet50", "gpt2", "llama-3.2-1b"])
def test_the_answer_goes_from_dense_to_attach_to_outer_as_links_get_slower(model):
    def answer(bandwidth):
        made = plan(model, compute_s=0.3, rates=link(bandwidth))
        if made.instead is not None:
            return 2, made.instead.every
        return (0 if sends_all(made.advised.method) else 1), 0

    answers = [answer(10**power) for power in (11, 10, 9, 8.5, 8, 7.5, 7, 6.5, 6, 5)]
    assert answers == sorted(answers)
    assert {kind for kind, _ in answers} == {0, 1, 2}
    assert answers[-1] == (2, INTERVALS[-1])


@pytest.mark.parametrize("rates", LINKS)
def test_outer_steps_are_advised_by_the_stated_rule(rates):
    intervals = set()
    for compute in (1e-4 * 1.7**power for power in range(26)):
        made = plan(SIZE, compute_s=compute, rates=rates)
        wait = made.fastest.exposed / made.fastest.step
        intervals.add(None if made.instead is None else made.instead.every)
        if made.instead is None:
            assert wait <= 0.3
            continue
        assert wait > 0.3
        exchange = made.instead.every * (made.instead.work + made.instead.exchange)
        step = made.instead.step - exchange / made.instead.every
        shares = {every: exchange / every / (step + exchange / every) for every in INTERVALS}
        assert made.instead.share == pytest.approx(shares[made.instead.every])
        enough = [every for every in INTERVALS if shares[every] < 0.15]
        assert made.instead.every == min(enough, default=100)
    assert intervals >= {None, 10, 30}  # 100 only where machines do not average inside


def test_inside_of_a_machine_every_step_averages():
    nodes = link(1e8, 1e-4, 16, 4)
    alone = plan(SIZE, compute_s=0.1, rates=link(1e8, 1e-4, 4), every=10**6)
    inside = plan(SIZE, compute_s=0.1, rates=nodes, every=10**6)
    assert row_of(alone.outer, OUTER).bytes < 1 + 0.4  # with second moments
    # A ring's, of float32 values, in every step.
    assert row_of(inside.outer, OUTER).bytes == pytest.approx(2 * 3 / 4 * 4 * SIZE, rel=0.01)
    assert row_of(inside.outer, OUTER).step > row_of(alone.outer, OUTER).step


def test_there_are_no_outer_steps_on_one_machine_or_through_a_server():
    one = plan("gpt2", compute_s=0, rates=link(1e6, ranks=8, ranks_per_node=8))
    server = plan("gpt2", compute_s=0, rates=link(1e6), topology="parameter-server")
    for made in (one, server):
        assert made.outer == ()
        assert made.instead is None
        assert "uter" not in assumptions(made) + verdict(made)


def test_a_verdict_says_what_is_advised_and_what_an_exchange_in_every_step_would_take():
    slow = plan("resnet50", compute_s=0.12, rates=link(1e7), steps=1000, every=7)
    assert slow.instead is not None
    told = verdict(slow)
    assert told.startswith(
        f"Use outer steps, every {slow.instead.every} steps: with {OUTER} a step"
    )
    assert f"{1000 // slow.instead.every} times in all" in told
    assert f"With an exchange in every step, use {slow.advised.method}" in told
    assert "Outer steps every 7 steps" in assumptions(slow)
    fast = verdict(plan("resnet50", compute_s=0.12, rates=link(1e11), every=7))
    assert fast.startswith("Stay dense")
    assert f"every 7 steps, with {OUTER}, a step takes 120 ms" in fast


def test_outer_steps_stand_below_the_others_in_the_table():
    made = plan("gpt2", compute_s=0.2, rates=link(1e8))
    methods, sends, *_, factors, _ = (list(column.cells) for column in table(made).columns)
    assert methods[-3:] == [row.method for row in made.outer]
    assert sends[methods.index("outer diloco")] == "all"
    assert factors[-3:] == ["", "", ""]


@pytest.mark.parametrize("every", [0, -1, 2.5, "3"])
def test_an_interval_is_a_number_of_steps(every):
    with pytest.raises(InputError, match="every must be"):
        plan("gpt2", compute_s=0.1, every=every)
