"""The kernels of coordinate descent against their definition in plain numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel import _cpu
from sparcel.products.linear.coordinate_descent import by_coordinates
from sparcel.products.linear.trainer import Examples
from tests.linear.reference import loss_at, random_rows, rows_of

LARGEST = {"logistic": 0.25, "squared_hinge": 2.0, "squared": 1.0}
seeds = st.integers(0, 2**32 - 1)
NONE = np.empty(0, np.int64)


def curvature_at(name, margin):
    """Return the curvature of the parabola that bounds a loss."""
    if name != "logistic":
        return np.full(len(margin), LARGEST[name])
    distance = np.maximum(np.abs(margin), 1e-9)
    return np.tanh(distance / 2) / (2 * distance)


@given(seed=seeds, rows=st.integers(0, 30), dimensions=st.integers(1, 40))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_columns_hold_the_entries_of_the_rows_in_order(threads, dtype, seed, rows, dimensions):
    dense = random_rows(seed, rows, dimensions, dtype)
    found = rows_of(dense)
    starts = np.empty(dimensions + 1, np.int64)
    places, values = np.empty(found.nnz, np.int32), np.empty(found.nnz, dtype)
    _cpu.transpose(
        found.offsets, found.columns, found.values, starts, places, values, threads=threads
    )
    expected = [np.flatnonzero(column) for column in dense.T]
    assert starts.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    assert places.tolist() == np.concatenate(expected).tolist()
    assert (values == dense.T[dense.T != 0]).all()


@given(
    seed=seeds,
    loss=st.sampled_from(sorted(LARGEST)),
    rows=st.integers(0, 30),
    dimensions=st.integers(3, 40),
    weighted=st.booleans(),
    stale=st.booleans(),
    width=st.sampled_from([1, 3]),
)
def test_derivatives_and_curvatures(loss, seed, rows, dimensions, weighted, stale, width):
    random = np.random.default_rng(seed)
    dense = random_rows(seed, rows, dimensions, np.float64)
    classes = random.integers(0, max(width, 2), rows)
    signs = np.where(classes[:, None] == np.arange(width), 1.0, -1.0)
    targets = signs[:, 0].copy() if width == 1 else classes.astype(float)
    margins = random.normal(size=(rows, width)) * 3
    weights = random.integers(0, 3, rows).astype(float) if weighted else None
    shard = by_coordinates(Examples(rows_of(dense), targets, weights, width), True, None)
    matrix = np.column_stack([dense[:, shard.columns], np.ones(rows)])
    drawn = np.array_split(random.permutation(shard.size), 3)
    before, after = drawn[1:] if stale else (NONE, NONE)
    sums = np.empty((len(drawn[0]), width, 2))
    for _ in range(2):  # the second call finds clean marks
        shard.entries.differentiate(loss, margins, drawn[0], before, after, sums, threads=2)
    each = np.ones(rows) if weights is None else weights
    meets = [(matrix[:, columns] != 0).sum(axis=1) for columns in (drawn[0], before, after)]
    others = (meets[1] > 0).astype(int) + (meets[2] > 0)
    chosen = matrix[:, drawn[0]]
    for k in range(width):
        own = curvature_at(loss, margins[:, k])
        curved = np.where(others > 0, LARGEST[loss] * (1 + others), own)
        slopes = loss_at(loss, margins[:, k], signs[:, k])[1]
        assert sums[:, k, 0] == pytest.approx(chosen.T @ (each * slopes))
        assert sums[:, k, 1] == pytest.approx(chosen.T**2 @ (each * meets[0] * curved))
    total = shard.entries.loss(loss, margins, threads=2)
    assert total == pytest.approx((loss_at(loss, margins, signs)[0].T * each).sum())
    changes = random.normal(size=(len(drawn[0]), width))
    shard.entries.change(drawn[0], changes, moved := margins.copy(), threads=2)
    assert moved == pytest.approx(margins + chosen @ changes)


@given(seed=seeds, loss=st.sampled_from(sorted(LARGEST)), scale=st.sampled_from([1e-4, 1, 30]))
def test_the_parabolas_lie_nowhere_below_the_losses(loss, seed, scale):
    random = np.random.default_rng(seed)
    targets, margins = random.choice([-1.0, 1.0], 50), random.normal(size=50) * scale
    change = random.normal(size=50) * random.choice([1e-3, 1, 30], 50)
    shard = by_coordinates(Examples(rows_of(np.eye(50)), targets), False, None)
    bounds = np.empty((50, 2))
    shard.entries.differentiate(loss, margins, np.arange(50), NONE, NONE, bounds, threads=1)
    before, after = (loss_at(loss, at, targets)[0] for at in (margins, margins + change))
    above = before + bounds[:, 0] * change + bounds[:, 1] / 2 * change**2
    assert (after <= above * (1 + 1e-9) + 1e-12).all()


def test_bits_are_the_same_at_any_number_of_threads():
    random = np.random.default_rng(0)
    dense = random_rows(7, 30000, 9) * np.float32(0.37)
    targets, margins = random.choice([-1, 1], 30000).astype(np.float32), random.normal(size=30000)
    shard = by_coordinates(Examples(rows_of(dense), targets), True, None)
    chosen, changes = np.arange(shard.size), random.normal(size=shard.size)
    found = []
    for threads in (1, 2, 5):
        sums, moved = np.empty((len(chosen), 2)), margins.copy()
        shard.entries.differentiate("logistic", margins, chosen, NONE, NONE, sums, threads=threads)
        shard.entries.change(chosen, changes, moved, threads=threads)
        total = shard.entries.loss("logistic", moved, threads=threads)
        found.append((sums.tobytes(), moved.tobytes(), total))
    assert found == [found[0]] * 3
    matrix = np.column_stack([dense, np.ones(30000)])
    assert moved == pytest.approx(margins + matrix @ changes)
    assert total == pytest.approx(loss_at("logistic", moved, targets)[0].sum())


def test_arrays_that_do_not_fit_are_refused():
    rows = rows_of(np.eye(3, dtype=np.float32))
    ones = np.ones(3, np.float32)
    shard = by_coordinates(Examples(rows, ones), False, None).entries
    margins, sums = np.zeros(3), np.empty((1, 2))
    for column in (-1, 3):
        with pytest.raises(ValueError, match="no such column"):
            shard.differentiate("squared", margins, np.array([column]), NONE, NONE, sums, 1)
        with pytest.raises(ValueError, match="no such column"):
            shard.change(np.array([column]), np.ones(1), margins, 1)
    with pytest.raises(ValueError, match="needs its margin"):
        shard.loss("squared", margins[:2], 1)
    with pytest.raises(ValueError, match="no smooth loss"):
        shard.differentiate("hinge", margins, np.array([0]), NONE, NONE, sums, 1)
    good = np.array([0, 1, 2, 3]), np.array([0, 1, 2], np.int32), ones
    for offsets, places in [
        ([0, 2, 1, 3], [0, 1, 2]),
        ([0, 1, 2, 4], [0, 1, 2]),
        ([0, 1, 2, 3], [0, 1, 3]),
        ([0, 2, 2, 3], [1, 0, 2]),
    ]:
        arrays = np.array(offsets), np.array(places, np.int32), ones
        with pytest.raises(ValueError, match=r"offsets do not fit|in order"):
            _cpu.LinearShard(*arrays, ones, None, 1)
    with pytest.raises(ValueError, match="outside of the dimensions"):
        _cpu.transpose(rows.offsets, rows.columns, ones, np.empty(3, np.int64), *good[1:], 1)
