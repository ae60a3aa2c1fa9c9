"""The planner: models, overlap with the backward pass, and its advice."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.network.papers_models import claims
from sparcel.core.cost import (
    STEPS,
    Problem,
    count,
    default_rates,
    predict,
    stated_rates,
    work_seconds,
)
from sparcel.core.cost.steps import SERVED, ahead
from sparcel.core.formats import format_named
from sparcel.core.schemes import DEFAULT, UNDER_MUON, front_loaded
from sparcel.errors import InputError
from sparcel.tools.plan import MODELS, Model, model_of, plan
from sparcel.tools.plan.planner import WORTH, _selecting
from sparcel.tools.plan.recorded import AT_10_PER_CENT, BETWEEN, OWN, POWERSGD, RECORDED, UNNAMED
from sparcel.tools.plan.report import assumptions, bits, not_counted, sources, table, verdict
from sparcel.tools.plan.steps import Workload, mean_step, sends_all

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

FAST = stated_rates(bandwidth=50e9, latency_s=2e-6, ranks=8, memory_bandwidth=1e12)
SLOW = stated_rates(bandwidth=1e8, latency_s=1e-4, ranks=8, memory_bandwidth=1e12)
FAR = stated_rates(bandwidth=2.5e6, latency_s=0.04, ranks=2, memory_bandwidth=1e12)
QUICK = stated_rates(
    bandwidth=2e9,
    latency_s=3e-5,
    ranks=32,
    ranks_per_node=8,
    node_bandwidth=25e9,
    memory_bandwidth=1e12,
)
NODES = stated_rates(bandwidth=1e8, latency_s=1e-4, ranks=16, ranks_per_node=4)


def test_models_are_names_numbers_and_modules():
    assert model_of("resnet50").parameters == 25_557_032
    assert model_of("25.6M").parameters == 25_600_000
    assert model_of("7B").parameters == 7 * 10**9
    assert model_of(1234).parameters == 1234
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    net[1].requires_grad_(False)
    assert model_of(net) == Model("Sequential", 8)
    with pytest.raises(InputError, match="did you mean 'resnet50'"):
        model_of("resnet5")
    with pytest.raises(InputError, match="the parameters of a model to plan for must be"):
        model_of(nn.ReLU())


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "intermediate", "key_values", "embeddings"),
    [
        ("llama-3.2-1b", 16, 2048, 8192, 512, 128256),
        ("llama-2-7b", 32, 4096, 11008, 4096, 2 * 32000),
    ],
)
def test_a_llama_s_parameters_follow_from_its_published_shapes(
    name, layers, hidden, intermediate, key_values, embeddings
):
    attention, mlp, norms = (
        2 * hidden * (hidden + key_values),
        3 * hidden * intermediate,
        2 * hidden,
    )
    found = layers * (attention + mlp + norms) + embeddings * hidden + hidden
    assert MODELS[name].parameters == found


def test_flops_are_of_the_order_of_the_parameters():
    assert all(model.flops > 100 * model.parameters for model in MODELS.values())


@pytest.mark.parametrize("topology", ["all-reduce", "parameter-server"])
@given(
    st.sampled_from(["resnet50", "gpt2", 1000, 10**7]),
    st.floats(0, 1),
    st.sampled_from([FAST, SLOW, NODES]),
    st.floats(0.0001, 1),
    st.none() | st.integers(1, 5000),
)
def test_a_step_is_computation_plus_exposed_exchange(
    topology, model, compute, rates, density, length
):
    made = plan(
        model, compute_s=compute, density=density, rates=rates, topology=topology, steps=length
    )
    times = [row.to_loss for row in made.rows]
    assert times == sorted(times)
    for row in made.rows:
        busy = row.work + row.exchange
        assert row.step == pytest.approx(compute + row.exposed)
        own = OWN.get(row.method.removesuffix(BETWEEN), {"density": density})["density"]
        keeps_coordinates = own < 1 and not sends_all(row.method) and row.method != POWERSGD
        assert (row.ahead > 0) == keeps_coordinates
        assert 0 <= row.exposed <= (row.ahead + busy) * (1 + 1e-9)
        # At most the backward pass overlaps with the exchange, and nothing with step-ahead.
        assert row.exposed >= row.ahead + busy - compute * 2 / 3 - 1e-9


def test_advice_is_dense_on_fast_links_and_sparse_on_slow_ones():
    dense = plan("resnet50", compute_s=0.1, rates=FAST)
    sparse = plan("resnet50", compute_s=0.1, rates=SLOW)
    assert dense.advised.method == "dense bf16"
    assert sparse.advised is sparse.best_sparse
    assert verdict(dense).startswith("Stay dense: with dense bf16 a step takes 10")
    assert verdict(sparse).startswith(f"Use {sparse.advised.method}")
    assert "The best dense method, dense bf16, takes" in verdict(sparse)
    assert "changes training" not in verdict(dense)
    assert "It changes training" in verdict(sparse)


def row_of(made, method):
    return next(row for row in made.rows if row.method == method)


def test_a_recommended_method_s_recorded_loss_is_named():
    made = plan("resnet50", compute_s=0.1, rates=FAR)
    assert made.advised.method == "topk"
    assert RECORDED["topk"].worst == (-0.34, "words")
    assert "lost 0.3 points of accuracy on its worst task, words" in verdict(made)
    assert "3.9 % more perplexity on words" in verdict(made)
    more = (
        "on a ResNet of 0.08 M parameters with SGD it needs 1.00 times the steps of dense training"
    )
    assert f"{more} for the same loss (0.93 to 1.02 by seed)" in verdict(made)
    methods, *_, factors, _ = (column.cells for column in table(made).columns)
    told = dict(zip(methods, factors, strict=True))
    assert (told["scalecom"], told["topk"], told["dense bf16"]) == ("1.18", "1.00", "")
    assert "topk, scalecom, gtopk: convergence.json, d9ac83e to f5196f5" in sources(made)


def test_what_loses_least_is_preferred_within_the_error_of_predictions():
    near = stated_rates(bandwidth=8e8, latency_s=1e-4, ranks=8, memory_bandwidth=1e12)
    made = plan("resnet50", compute_s=0.1, rates=near)
    assert made.advised.method == UNNAMED != made.rows[0].method
    assert made.advised.to_loss <= WORTH * made.fastest.to_loss
    assert "No other is 1.1 times as fast" in verdict(made)
    slower = plan("resnet50", compute_s=0.12, rates=SLOW)
    assert row_of(slower, UNNAMED).to_loss > WORTH * slower.fastest.to_loss
    assert slower.advised.method == AT_10_PER_CENT
    assert "attach(model, density=0.1, format='packed:4'): a step takes" in verdict(slower)
    far = plan("gpt2", compute_s=0.1, rates=FAR)
    assert row_of(far, AT_10_PER_CENT).to_loss > WORTH * far.advised.to_loss


def test_under_muon_the_default_is_another_and_what_was_not_recorded_is_not_advised():
    made = plan("gpt2", compute_s=0.1, rates=SLOW, muon=True)
    default = row_of(made, UNNAMED)
    assert (default.density, default.format.name) == (1, UNDER_MUON["format"])
    assert made.rows[0].factor is None
    assert made.advised is made.fastest is row_of(made, POWERSGD)
    assert "a language model of 1.3 M parameters with Muon" in verdict(made)
    assert f"With {UNNAMED} it was 0.0 %" in verdict(made)
    assert plan("gpt2", compute_s=0.6, rates=SLOW, muon=True).advised.method == AT_10_PER_CENT
    on_nodes = plan("gpt2", compute_s=0.2, rates=QUICK, muon=True)
    assert on_nodes.advised.method == UNNAMED + BETWEEN
    assert "sparcel.scheme(density=1.0, format='packed:8')" in verdict(on_nodes)


def test_between_machines_what_attach_does_waits_less_than_between_all_ranks():
    made = plan("gpt2", compute_s=0.6, rates=NODES)
    for name in OWN:
        flat, between = row_of(made, name), row_of(made, name + BETWEEN)
        assert between.exposed < flat.exposed
        assert (between.factor, between.format) == (flat.factor, flat.format)
    assert made.advised.method.endswith(BETWEEN)
    assert "attach(model, sparcel.Hierarchical(sparcel.scheme(" in verdict(made)


def test_the_harder_of_two_tasks_counts_and_what_was_not_trained_on_both_is_not_advised():
    made = plan("gpt2", compute_s=0.6, rates=NODES)
    for method in (UNNAMED, AT_10_PER_CENT, POWERSGD):
        factors = [mean(RECORDED[method].factors[task]) for task in ("words", "code")]
        assert row_of(made, method).factor == pytest.approx(max(1, *factors), rel=0.01)
    known = row_of(made, "gtopk")
    assert (known.seeds, known.factor) == (0, RECORDED["gtopk"].factor("text"))
    assert known.to_loss < made.advised.to_loss / WORTH
    assert row_of(plan("resnet50", compute_s=0.6, rates=NODES), "gtopk").seeds == 3


def test_a_method_that_needs_more_steps_comes_after_one_whose_steps_take_longer():
    made = plan("resnet50", compute_s=0.2, rates=SLOW)
    own, other = row_of(made, AT_10_PER_CENT), row_of(made, "scalecom")
    assert other.step < own.step
    assert made.rows.index(own) < made.rows.index(other)
    assert other.to_loss == other.step * RECORDED["scalecom"].factor("images")


def test_what_attach_does_is_planned_whatever_the_others_send():
    given = plan("gpt2", compute_s=0.1, rates=SLOW)
    other = plan("gpt2", compute_s=0.1, rates=SLOW, density=0.1, format="packed:4")
    for name in OWN:
        assert row_of(given, name) == row_of(other, name)
    assert "all packed:5" in [*table(given).columns[1].cells]


def test_powersgd_sends_what_matrices_of_rank_4_take_in_gpt_2():
    width, ranks = 768, 8
    block = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    values = sum(4 * (rows + columns) for rows, columns in [*12 * block, (50257, width)])
    sent = row_of(plan("gpt2", compute_s=0.1, rates=SLOW), POWERSGD)
    assert sent.bytes == pytest.approx(2 * (ranks - 1) / ranks * 4 * values, rel=0.3)
    faster = plan("gpt2", compute_s=0.6, rates=SLOW.slower(8))
    assert faster.advised.method == POWERSGD
    assert "Use PowerSGD 4, torch's powerSGD_hook: a step takes" in verdict(faster)
    assert "what has a higher rank is applied later" in verdict(faster)


@pytest.mark.parametrize(
    ("method", "answer", "bits"),
    [(DEFAULT, "packed:6", 6.25), (DEFAULT, "packed:4", 4.25), ("topk", "packed:4", 4.25)],
)
def test_everything_in_few_bits_goes_up_in_4_and_comes_down_in_those_of_the_answer(
    method, answer, bits
):
    def answered(formula, problem):
        return formula(replace(problem, answer=format_named(answer)))

    work = Workload(Model("one", 1 << 23), 1.0, 0.1, format=format_named("packed:4"))
    row = mean_step(method, work, partial(answered, partial(_selecting, method)), SLOW)
    assert row.bytes == pytest.approx((4.25 + bits) / 8 * (1 << 23) * 7 / 8, rel=1e-3)
    assert row.ahead == 0
    by_regions = mean_step(DEFAULT, work, partial(answered, STEPS[DEFAULT]), SLOW)
    assert (row.step, row.work) == (by_regions.step, by_regions.work)


def test_front_loading_is_averaged_over_the_training():
    settings = {"compute_s": 0, "rates": SLOW, "density": 0.001}
    row = row_of(plan(10**6, **settings, steps=1000), "gtopk")
    assert row.density == pytest.approx(mean(front_loaded(0.001, step) for step in range(1000)))
    later = row_of(plan(10**6, **settings), "gtopk")
    # Its messages are as long as k, so bytes are in proportion; time has a constant part.
    assert row.bytes / later.bytes == pytest.approx(row.density / later.density, rel=0.01)
    assert later.step < row.step < later.step * row.density / later.density


def test_a_plan_without_a_length_says_what_it_does_not_count():
    assert "--steps" in not_counted(plan("resnet50", compute_s=0.1, rates=SLOW))
    for settings in ({"density": 1}, {"steps": 100}):
        made = plan(1000, compute_s=0.1, rates=SLOW, **settings)
        assert "--steps" not in not_counted(made)
        assert "Not predicted: any time on a GPU" in not_counted(made)


def test_step_ahead_takes_about_what_was_measured_with_adam():
    rows = json.loads((RESULTS / "ahead_cost.json").read_text())["rows"]
    for row in rows:
        if row["optimizer"] == "AdamW":
            added = row["forward_ms"] - row["forward_without_ms"]
            told = 1000 * work_seconds(ahead(row["parameters"]), default_rates())
            assert 0.4 * added < told < 2 * added


def test_a_lead_within_the_error_of_predictions_changes_nothing():
    made = plan("resnet50", compute_s=0.12, rates=QUICK)
    assert made.best_sparse.step < made.best_dense.step < 1.1 * made.best_sparse.step
    assert made.advised is made.best_dense


@pytest.mark.parametrize("model", ["resnet50", "gpt2"])
def test_the_advice_changes_where_the_plan_says(model):
    def advice(bandwidth):
        rates = stated_rates(bandwidth=bandwidth, latency_s=1e-6, ranks=8, memory_bandwidth=1e12)
        return plan(model, compute_s=0.1, rates=rates)

    made = advice(1e9)
    at = made.flip_bytes_per_s
    assert at is not None
    assert advice(1.1 * at).advised.method in ("dense fp32", "dense bf16")
    assert advice(0.9 * at).advised.method not in ("dense fp32", "dense bf16")
    assert bits(at) in verdict(made)


def test_several_ranks_a_node_add_the_methods_on_two_levels():
    assert {"hitopk", "torus2d"} <= {
        row.method for row in plan(10**6, compute_s=0, rates=NODES).rows
    }
    assert "hitopk" not in {row.method for row in plan(10**6, compute_s=0, rates=SLOW).rows}


@given(
    st.sampled_from(sorted(SERVED)),
    st.integers(2, 8),
    st.integers(1, 16),
    st.integers(100, 10**6),
    st.floats(0.001, 1),
)
def test_the_ranks_of_a_node_share_its_link_to_the_server_and_nobody_else_does(
    method, nodes, here, size, density
):
    ranks = nodes * here
    problem = Problem(size, math.ceil(density * size), ranks, here)
    rates = stated_rates(bandwidth=1e8, latency_s=1e-4, ranks=ranks, ranks_per_node=here)
    traffic = count(SERVED[method], problem)
    rounds = 4 if method == "scalecom" else 2  # indices there and back, then values
    assert traffic.rounds == rounds
    both = traffic.bytes_sent + traffic.bytes_received
    exchange = predict(SERVED[method], problem, rates).exchange
    assert exchange == pytest.approx(rounds * 1e-4 + here * both / 1e8)
    if method == "topk":
        # A sum may be dense, whose header is 8 bytes shorter.
        assert traffic.bytes_received + 8 >= traffic.bytes_sent
    else:
        assert traffic.bytes_received == traffic.bytes_sent


def test_scalecom_s_appendix_f_is_what_a_plan_with_a_server_tells():
    for what, theirs, ours, _ in claims():
        told = float(theirs.removeprefix("below ").rstrip(" %×")) / (100 if "%" in theirs else 1)
        if "below" in theirs:
            assert ours < told
        else:
            assert ours == pytest.approx(told, rel=0.175), what


def test_arguments_are_checked():
    with pytest.raises(InputError, match="topology must be"):
        plan("gpt2", compute_s=0, topology="star")
    with pytest.raises(InputError, match="density must lie"):
        plan("gpt2", compute_s=0, density=3)
    with pytest.raises(InputError, match="compute_s must be at least 0, got -1"):
        plan("gpt2", compute_s=-1)


def test_the_table_has_a_row_for_each_method_and_a_legend():
    made = plan("gpt2", compute_s=0.2, rates=SLOW)
    assert table(made).row_count == len(made.rows) + len(made.outer) == 9 + 3
    assert "gpt2: 124,439,808 gradients, 200 ms" in assumptions(made)
    assert "8 nodes of 1 rank, 800 Mbit/s (0.8 Gbit/s and 100 µs, stated);" in assumptions(made)


def test_auto_is_the_exact_format_that_the_schemes_choose():
    auto, packed, raw = (
        plan("gpt2", compute_s=0.1, rates=SLOW, format=one) for one in ("auto", "packed", "raw")
    )
    assert row_of(auto, "oktopk") == row_of(packed, "oktopk") != row_of(raw, "oktopk")


def test_a_step_that_sends_everything_is_a_dense_sum():
    whole = plan(10**6, compute_s=0, rates=SLOW, density=1)
    for name in ("topk", "gtopk", "oktopk"):
        assert row_of(whole, name).bytes == pytest.approx(
            row_of(whole, "dense fp32").bytes, rel=0.01
        )


def test_nothing_is_said_of_losses_that_were_not_recorded():
    recorded = plan("gpt2", compute_s=0.1, rates=FAR)
    assert "In recorded trainings (5 small tasks" in verdict(recorded)
    for settings in ({"density": 0.001}, {"format": "packed:4"}):
        other = plan("gpt2", compute_s=0.1, rates=FAR, **settings)
        assert "convergence.json" not in sources(other)
        assert other.advised.seeds == 3 > other.rows[0].seeds
    served = plan("gpt2", compute_s=0.1, rates=FAR, density=0.001, topology="parameter-server")
    assert "No training at this density and format was recorded" in verdict(served)
