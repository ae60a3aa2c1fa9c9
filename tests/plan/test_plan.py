"""The planner: models, overlap with the backward pass, and its advice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparcel.cost import stated_rates
from sparcel.errors import InputError
from sparcel.plan import MODELS, Model, model_of, plan
from sparcel.plan.recorded import RECORDED
from sparcel.plan.report import assumptions, bits, not_counted, table, verdict
from sparcel.schemes import front_loaded

FAST = stated_rates(bandwidth=50e9, latency_s=2e-6, ranks=8, memory_bandwidth=1e12)
SLOW = stated_rates(bandwidth=1e8, latency_s=1e-4, ranks=8, memory_bandwidth=1e12)
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


def test_flops_are_of_the_order_of_the_parameters():
    assert all(model.flops > 100 * model.parameters for model in MODELS.values())


@pytest.mark.parametrize("topology", ["all-reduce", "parameter-server"])
@given(
    st.sampled_from(["resnet50", "gpt2", 1000, 10**7]),
    st.floats(0, 1),
    st.sampled_from([FAST, SLOW, NODES]),
    st.floats(0.0001, 1),
)
def test_a_step_is_computation_plus_exposed_exchange(topology, model, compute, rates, density):
    made = plan(model, compute_s=compute, density=density, rates=rates, topology=topology)
    steps = [row.step for row in made.rows]
    assert steps == sorted(steps)
    for row in made.rows:
        work = row.select + row.pack + row.exchange + row.reduce
        assert row.step == pytest.approx(compute + row.exposed)
        assert 0 <= row.exposed <= work * (1 + 1e-9)
        # At most the backward pass overlaps with the exchange.
        assert row.exposed >= work - compute * 2 / 3 - 1e-9


def test_advice_is_dense_on_fast_links_and_sparse_on_slow_ones():
    dense = plan("resnet50", compute_s=0.1, rates=FAST)
    sparse = plan("resnet50", compute_s=0.1, rates=SLOW)
    assert dense.advised.method == "dense bf16"
    assert sparse.advised is sparse.best_sparse
    assert verdict(dense).startswith("Stay dense: with dense bf16 a step takes 10")
    assert verdict(sparse).startswith(f"Use {sparse.advised.method}: with")
    assert "The best dense method, dense bf16, takes" in verdict(sparse)
    assert "changes training" not in verdict(dense)
    assert f"{sparse.advised.method} changes training" in verdict(sparse)


def test_a_recommended_method_s_recorded_loss_is_named():
    made = plan("resnet50", compute_s=0.1, rates=SLOW)
    assert made.advised.method == "scalecom"
    assert RECORDED["scalecom"].worst == (-1.73, "images")
    assert "lost 1.7 points of accuracy on its worst task, images" in verdict(made)
    assert "7.5 % more perplexity on words" in verdict(made)
    methods, *_, points = (column.cells for column in table(made).columns)
    lost = dict(zip(methods, points, strict=True))
    assert lost["scalecom"] == "1.7"
    assert lost["topk"] == "0.3"
    assert not lost["dense bf16"]


def test_what_front_loading_adds_is_told_for_the_plan_s_own_density():
    told = not_counted(plan("resnet50", compute_s=0.1, rates=SLOW))
    assert "The mean density is 5.83 % in 120 steps" in told
    assert "Not measured: any time on a GPU" in told
    other = not_counted(plan("resnet50", compute_s=0.1, density=0.001, rates=SLOW))
    mean = sum(front_loaded(0.001, step) for step in range(1000)) / 1000
    assert f"{100 * mean:.3g} % in 1,000 steps" in other
    for density in (0.1, 1):
        made = plan(1000, compute_s=0.1, density=density, rates=SLOW)
        assert "front-loading" not in not_counted(made)


def test_a_lead_within_the_error_of_predictions_changes_nothing():
    made = plan("resnet50", compute_s=1.0, rates=stated_rates(bandwidth=1e9, latency_s=0, ranks=8))
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


def test_a_server_s_link_carries_everybody_s_messages():
    made = plan(10**7, compute_s=0, rates=SLOW, topology="parameter-server")
    dense = next(row for row in made.rows if row.method == "dense fp32")
    assert dense.exchange == pytest.approx(8 * 2 * 4e7 / 1e8, rel=0.01)
    scalecom, topk = (
        next(row for row in made.rows if row.method == name) for name in ("scalecom", "topk")
    )
    assert scalecom.bytes < topk.bytes / 3  # the sum of eight selections


def test_arguments_are_checked():
    with pytest.raises(InputError, match="topology must be"):
        plan("gpt2", compute_s=0, topology="star")
    with pytest.raises(InputError, match="density must lie"):
        plan("gpt2", compute_s=0, density=3)
    with pytest.raises(InputError, match="compute_s must be at least 0, got -1"):
        plan("gpt2", compute_s=-1)


def test_the_table_has_a_row_for_each_method_and_a_legend():
    made = plan("gpt2", compute_s=0.2, rates=SLOW)
    assert table(made).row_count == len(made.rows) == 6
    assert "gpt2: 124,439,808 gradients, 200 ms" in assumptions(made)
    assert "8 nodes of 1 rank, 800 Mbit/s stated" in assumptions(made)
