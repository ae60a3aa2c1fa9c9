"""The kernels of linear models against their definition in plain numpy."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparcel.products.linear.batches import TAIL, arrange
from sparcel.products.linear.weights import Weights
from tests.linear.reference import DenseModel, random_rows, rows_of

LOSSES = ("logistic", "hinge", "squared_hinge", "squared")
seeds = st.integers(0, 2**32 - 1)


def step(weights: Weights, batch, loss: str, rate: float) -> np.ndarray:
    """Take a step with one batch; return its gradient with the tail."""
    out = np.empty((len(batch.columns), weights.width), weights.dtype)
    columns = batch.columns[:-TAIL].numpy()
    batch.gradient(weights.read_at(columns), weights.intercept, loss, out)
    weights.step(columns, out[:-TAIL], out[-TAIL:].astype(np.float64), rate)
    return out


def dense_of(batch, weights: Weights, derivatives: np.ndarray) -> np.ndarray:
    """Return X'd of a batch, dense."""
    out = np.empty((len(batch.columns) - TAIL, weights.width), weights.dtype)
    batch.entries.gradient(derivatives, weights.width, out, 1)
    dense = np.zeros((weights.dimensions, weights.width), weights.dtype)
    dense[batch.columns[:-TAIL].numpy()] = out
    return dense


@given(seed=seeds, rows=st.integers(1, 40), dimensions=st.integers(1, 60), size=st.integers(1, 50))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_batches_hold_every_row_once(dtype, seed, rows, dimensions, size):
    dense = random_rows(seed, rows, dimensions, dtype)
    order = np.random.default_rng(seed).permutation(rows)
    batches = arrange(rows_of(dense), np.ones(rows, dtype), None, size, order)
    assert [batch.rows for batch in batches] == pytest.approx(
        [rows / len(batches)] * len(batches), abs=1
    )
    assert max(batch.rows for batch in batches) <= size
    start = 0
    for batch in batches:
        weights = Weights(dimensions, batch.rows, dtype=dtype)
        found = dense_of(batch, weights, np.eye(batch.rows, dtype=dtype))
        assert (dense[order[start : start + batch.rows]] == found.T).all()
        start += batch.rows
    assert start == rows


@given(
    seed=seeds,
    loss=st.sampled_from(LOSSES),
    rows=st.integers(1, 40),
    dimensions=st.integers(1, 60),
    weighted=st.booleans(),
    l1=st.sampled_from([0.0, 0.02]),
    l2=st.sampled_from([0.0, 0.1]),
)
@pytest.mark.parametrize("adaptive", [False, True])
def test_steps_are_those_of_a_dense_model(adaptive, seed, loss, rows, dimensions, weighted, l1, l2):
    if adaptive:  # what it owes while gradients are zero has a test of its own
        l1 = l2 = 0.0
    dense = random_rows(seed, rows, dimensions, np.float64)
    random = np.random.default_rng(seed)
    targets = random.choice([-1.0, 1.0], rows)
    row_weights = random.integers(0, 3, rows).astype(float) if weighted else np.ones(rows)
    (batch,) = arrange(
        rows_of(dense), targets, row_weights if weighted else None, rows, np.arange(rows)
    )
    weights = Weights(dimensions, 1, l1, l2, adaptive, dtype=np.float64)
    model = DenseModel(loss, l1, l2, adaptive, np.zeros(dimensions))
    for rate in (0.5, 0.125, 0.25):
        margins = dense @ model.weights + model.intercept
        assume(loss != "hinge" or not np.isclose(targets * margins, 1).any())  # its kink
        gradient, slope, total = model.gradient(dense, targets, row_weights)
        share = 1 / max(row_weights.sum(), 1e-300) if row_weights.any() else 0.0
        out = step(weights, batch, loss, rate)
        assert out[-TAIL:, 0] == pytest.approx([slope, row_weights.sum(), total])
        model.step(gradient * share, slope * share, rate)
        coordinates, intercepts = weights.read()
        assert coordinates[:, 0] == pytest.approx(model.weights, abs=1e-6 if adaptive else 1e-12)
        assert intercepts[0] == pytest.approx(model.intercept, abs=1e-6 if adaptive else 1e-12)


@given(
    seed=seeds,
    steps=st.integers(1, 30),
    l1=st.sampled_from([0.0, 0.01]),
    l2=st.sampled_from([0.0, 0.5]),
)
def test_a_coordinate_is_regularised_in_steps_that_do_not_touch_it(seed, steps, l1, l2):
    random = np.random.default_rng(seed)
    dense = random_rows(seed, steps, 12, np.float64)
    batches = arrange(rows_of(dense), random.choice([-1.0, 1.0], steps), None, 1, np.arange(steps))
    weights = Weights(12, 1, l1, l2, dtype=np.float64)
    model = DenseModel("logistic", l1, l2, False, np.zeros(12))
    for number, batch in enumerate(batches):
        rate = 1 / (1 + number)
        out = step(weights, batch, "logistic", rate)
        gradient = np.zeros(12)
        gradient[batch.columns[:-TAIL].numpy()] = out[:-TAIL, 0]
        model.step(gradient, float(out[-TAIL, 0]), rate)
        assert weights.read()[0][:, 0] == pytest.approx(model.weights, abs=1e-12)


def test_with_adagrad_a_coordinate_owes_one_proximal_step_of_all_lengths():
    l1, l2, rates = 0.01, 0.3, [0.5, 0.25, 0.125]
    dense = np.zeros((4, 3))
    dense[0] = 1, 2, 0
    dense[1:, 2] = 1
    batches = arrange(rows_of(dense), np.ones(4), None, 1, np.arange(4))
    weights = Weights(3, 1, l1, l2, True, dtype=np.float64)
    step(weights, batches[0], "logistic", 1.0)
    root = np.sqrt(weights.rows[:2, 1]) + 1e-7
    after = weights.rows[:2, 0].copy()
    for batch, rate in zip(batches[1:], rates, strict=True):
        step(weights, batch, "logistic", rate)
    length = (1.0 + sum(rates)) / root
    expected = np.maximum(np.abs(after) - l1 * length, 0) / (1 + l2 * length)
    assert np.abs(weights.read()[0][:2, 0]) == pytest.approx(expected)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("adaptive", "l1", "l2"), [(False, 0.01, 0.1), (True, 0.01, 0.1), (True, 0, 0)]
)
def test_bits_are_the_same_at_any_number_of_threads(width, adaptive, l1, l2):
    dense = random_rows(7, 2000, 900) * np.float32(0.37)
    random = np.random.default_rng(0)
    targets = random.integers(0, width, 2000) if width > 1 else random.choice([-1, 1], 2000)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        batches = arrange(rows_of(dense), targets.astype(np.float32), None, 1000, np.arange(2000))
        weights = Weights(900, width, l1, l2, adaptive)
        for batch in batches:
            step(weights, batch, "logistic", 0.5)
        found.append(np.append(weights.rows, weights.intercept.astype(np.float32)).tobytes())
    torch.set_num_threads(1)
    assert len(set(found)) == 1


@given(
    seed=seeds,
    ranks=st.integers(1, 5),
    dimensions=st.integers(1, 400),
    width=st.sampled_from([1, 3]),
    rule=st.sampled_from([(False, 0, 0.1), (False, 0.01, 0.1), (True, 0, 0), (True, 0.01, 0.1)]),
    threads=st.sampled_from([1, 3]),
)
def test_a_step_of_a_sum_is_that_of_gradients_added_before(
    seed, ranks, dimensions, width, rule, threads
):
    random = np.random.default_rng(seed)
    torch.set_num_threads(threads)
    one, other = (Weights(dimensions, width, rule[1], rule[2], rule[0]) for _ in range(2))
    buffer = np.zeros((dimensions, width), np.float32)
    for rate in (0.5, 0.25):
        total, tail = np.zeros_like(buffer), np.array([[0.5] * width, [4.0] * width, [1] * width])
        columns, values = [], []
        for _ in range(ranks):
            own = np.flatnonzero(random.random(dimensions) < 0.4).astype(np.int32)
            gradient = random.integers(-2, 3, (len(own), width)).astype(np.float32) * 0.37
            total[own] += gradient
            columns.append(own)
            values += [gradient, tail.astype(np.float32)]
        bounds = [0, *np.cumsum([len(own) for own in columns]).tolist()]
        one.step_sum(np.concatenate(columns), bounds, np.concatenate(values), buffer, tail, rate)
        other.step(None, total, tail, rate)
    torch.set_num_threads(1)
    assert (one.rows == other.rows).all()
    assert (one.intercept == other.intercept).all()
    assert not buffer.any()


def test_sums_that_do_not_fit_the_model_are_refused():
    weights, tail = Weights(4), np.zeros((TAIL, 1))
    buffer = np.zeros((4, 1), np.float32)
    for columns, bounds, rows in (
        ([0, 4], [0, 2], 5),
        ([1, 0], [0, 2], 5),
        ([-1, 0], [0, 2], 5),
        ([0, 1], [0, 1], 5),
        ([0, 1], [0, 2], 4),
        ([0, 1], [0, 2, 1, 2], 11),
    ):
        values = np.zeros((rows, 1), np.float32)
        with pytest.raises(ValueError, match="column"):
            weights.step_sum(np.array(columns, np.int32), bounds, values, buffer, tail, 0.1)


@pytest.mark.parametrize(("adaptive", "l2"), [(False, 0.3), (True, 1e-6), (True, 0.0)])
def test_the_average_is_that_of_the_models_after_each_step(adaptive, l2):
    dense = random_rows(3, 20, 9, np.float64)
    batches = arrange(rows_of(dense), np.ones(20), None, 4, np.arange(20))
    weights, single = (
        Weights(9, 1, 0.0, l2, adaptive, average=a, dtype=np.float64) for a in (True, False)
    )
    models = []
    for batch in batches:
        for one in (weights, single):
            step(one, batch, "logistic", 0.5)
        models.append(np.append(*single.read()))
    assert np.append(*weights.read()) == pytest.approx(np.mean(models, axis=0))


@pytest.mark.parametrize("width", [1, 3])
def test_the_average_holds_what_regularisation_did_between_two_gradients(width):
    """A coordinate that is not seen again shrinks, and so does its part of the average."""
    weights = Weights(70, width, 0.0, 0.2, True, True, np.float64)
    once, others = np.arange(0, 70, 2, dtype=np.int32), np.arange(1, 70, 2, dtype=np.int32)
    tail, models = np.ones((TAIL, width)), []
    random = np.random.default_rng(0)
    values = random.uniform(0.5, 2, (35, width)) * random.choice([-1, 1], (35, width))
    for step in range(400):
        columns = others if step % 200 else once
        weights.step(columns, values, tail, 0.01)
        now = np.empty_like(weights.read()[0])
        weights._model.read(now)
        models.append(now)
    shrunk = np.abs(models[-1][once]) / np.abs(models[200][once])
    assert shrunk.max() < 0.95
    assert weights.read()[0] == pytest.approx(np.mean(models, axis=0), rel=1e-3)


def test_a_scale_that_becomes_small_is_multiplied_into_the_coordinates():
    dense = random_rows(3, 8, 9, np.float64)
    (batch,) = arrange(rows_of(dense), np.ones(8), None, 8, np.arange(8))
    for l1 in (0.0, 0.01):
        weights = Weights(9, 1, l1, 1.0, average=l1 == 0, dtype=np.float64)
        model = DenseModel("logistic", l1, 1.0, False, np.zeros(9))
        models = []
        for _ in range(12):
            gradient, slope, _ = model.gradient(dense, np.ones(8), np.ones(8))
            step(weights, batch, "logistic", 10.0)
            model.step(gradient / 8, slope / 8, 10.0)
            models.append(model.weights)
        expected = np.mean(models, axis=0) if l1 == 0 else model.weights
        assert weights.read()[0][:, 0] == pytest.approx(expected)
