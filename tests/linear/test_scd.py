"""Coordinate descent: its optimum, its descent, and what ranks send one another."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import ElasticNet, Lasso, LogisticRegression, Ridge
from sklearn.svm import LinearSVC

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.patterns import cuts
from sparcel.errors import InputError
from sparcel.products.linear import coordinate_descent as scd_module
from sparcel.products.linear.coordinate_descent import Scd, draws
from sparcel.products.linear.trainer import Examples, Settings
from tests.linear.reference import loss_at, random_rows, rows_of

ROWS, DIMENSIONS = 60, 14


def problem(loss: str, seed: int = 0, dtype=np.float64):
    """Return rows, one column of which is empty, and targets."""
    random = np.random.default_rng(seed)
    dense = random_rows(seed, ROWS, DIMENSIONS, dtype)
    dense[:, 3] = 0
    signal = dense @ random.normal(size=DIMENSIONS) + random.normal(size=ROWS) + 0.5
    return dense, (signal if loss == "squared" else np.where(signal > 0, 1.0, -1.0)).astype(dtype)


def trainer(comm: Communicator | None, loss: str, dtype=np.float64, **more) -> Scd:
    """Return what trains on a rank's rows; where there are ranks, the last has none."""
    dense, targets = problem(loss, dtype=dtype)
    ranks, rank = (comm.size, comm.rank) if comm else (1, 0)
    own = np.arange(ROWS) % max(ranks - 1, 1) == rank
    settings = Settings(solver="scd", loss=loss, **more)
    return Scd(Examples(rows_of(dense[own]), targets[own]), settings, comm)


def objective(loss: str, coefficients, intercept: float, l1: float, l2: float) -> float:
    dense, targets = problem(loss)
    mean = loss_at(loss, dense @ coefficients + intercept, targets)[0].mean()
    return mean + l2 / 2 * (coefficients**2).sum() + l1 * np.abs(coefficients).sum()


def minimised(scd: Scd) -> float:
    """Return what a trainer minimises; all ranks call."""
    coordinates, _ = scd.read()
    settings, values = scd._settings, coordinates.astype(np.float64)
    return scd.loss() + settings.l2 / 2 * (values**2).sum() + settings.l1 * np.abs(values).sum()


def best(loss: str, l1: float, l2: float) -> float:
    """Return the least objective that scikit-learn finds."""
    exact = {"tol": 1e-12, "max_iter": 1_000_000}
    dense, targets = problem(loss)
    if loss == "squared":
        if l1 and l2:
            model = ElasticNet(alpha=l1 + l2, l1_ratio=l1 / (l1 + l2), **exact)
        else:
            model = Lasso(alpha=l1, **exact) if l1 else Ridge(alpha=l2 * ROWS, tol=1e-12)
    elif loss == "squared_hinge":
        # liblinear regularises the intercept; by 1e8, not noticeably.
        model = LinearSVC(C=1 / (l2 * ROWS), dual=False, intercept_scaling=1e4, **exact)
    elif l1:
        model = LogisticRegression(
            **{"C": 1 / (l1 * ROWS), "l1_ratio": 1, "solver": "saga", **exact}
        )
    else:
        model = LogisticRegression(C=1 / (l2 * ROWS), **exact)
    model.fit(dense, targets)
    return objective(loss, np.ravel(model.coef_), np.ravel(model.intercept_)[0], l1, l2)


@pytest.mark.parametrize(
    ("loss", "l1", "l2", "ranks"),
    [
        ("logistic", 0.0, 0.05, 2),
        ("logistic", 0.03, 0.0, 2),
        ("squared_hinge", 0.0, 0.2, 5),
        ("squared", 0.0, 0.1, 5),
        ("squared", 0.1, 0.0, 2),
        ("squared", 0.1, 0.1, 2),
    ],
)
def test_training_reaches_the_optimum_of_scikit_learn(loss, l1, l2, ranks):
    least = best(loss, l1, l2)

    def run(comm):
        scd = trainer(
            comm, loss, l1=l1, l2=l2, block=3, asynchronous=comm is not None and comm.size == 5
        )
        while minimised(scd) > least * (1 + 1e-6) and scd.epochs < 300:
            scd.epoch()
        coefficients, intercept = scd.read()
        assert len(scd.values) == DIMENSIONS  # without the empty column, with the intercept
        found = objective(loss, coefficients[:, 0], intercept[0], l1, l2)
        assert minimised(scd) == pytest.approx(found, rel=1e-9)
        assert found <= least * (1 + 1e-6)
        return scd.values.tobytes()

    run(None)
    results = simulate(ranks, run).results
    assert results == [results[0]] * ranks


@given(
    seed=st.integers(0, 1000),
    loss=st.sampled_from(["logistic", "squared_hinge", "squared"]),
    block=st.sampled_from([1, 4, 100]),
    l1=st.sampled_from([0.0, 0.05]),
    ranks=st.sampled_from([1, 3]),
)
@settings(max_examples=12)
def test_the_objective_never_rises(seed, loss, block, l1, ranks):
    def run(comm):
        scd = trainer(comm, loss, l1=l1, l2=0.01, block=block, random_state=seed)
        found = [minimised(scd)]
        for _ in range(2):
            scd.epoch(lambda _: found.append(minimised(scd)))
        return found

    for found in simulate(ranks, run).results:
        assert (np.diff(found) <= 1e-12 * found[0]).all()
        assert found[-1] < found[0]


@given(
    seed=st.integers(0, 1000),
    loss=st.sampled_from(["logistic", "squared_hinge", "squared"]),
    block=st.sampled_from([2, 5]),
)
@settings(max_examples=12)
def test_asynchronous_steps_never_raise_the_objective_and_what_is_owed(seed, loss, block):
    dense, _ = problem(loss)
    matrix = np.column_stack([dense[:, dense.any(axis=0)], np.ones(ROWS)])
    largest = {"logistic": 0.25, "squared_hinge": 2.0, "squared": 1.0}[loss]
    with patch.object(scd_module, "_LEAST_STEPS", 3):  # so that several coordinates meet
        scd = trainer(None, loss, l2=0.01, block=block, random_state=seed, asynchronous=True)
    slices = np.array([0, len(scd.values)])
    for epoch in range(2):
        drawn, seen = draws(seed, epoch, slices, scd.steps), [(minimised(scd), scd.values.copy())]
        scd.epoch(lambda _, seen=seen: seen.append((minimised(scd), scd.values.copy())))
        found = []
        for chosen, (_, before), (least, values) in zip(drawn, seen, seen[1:], strict=False):
            met = (matrix[:, chosen] != 0).any(axis=1)
            change = matrix @ (values - before)[:, 0] * met
            found.append(least + largest / 2 * (change**2).mean())
        assert (np.diff([*found, minimised(scd)]) <= 1e-12 * found[0]).all()


@given(seed=st.integers(0, 1000), asynchronous=st.booleans(), ranks=st.sampled_from([1, 2, 3, 5]))
@settings(max_examples=10)
def test_all_ranks_hold_the_same_bits(seed, asynchronous, ranks):
    def run(comm):
        more = {"asynchronous": asynchronous, "random_state": seed, "l1": 0.02}
        scd = trainer(comm, "logistic", np.float32, block=2, **more)
        losses = [scd.epoch().loss for _ in range(2)]
        return scd.values.tobytes(), losses

    found = simulate(ranks, run).results
    assert found == [found[0]] * ranks


@given(
    seed=st.integers(0, 1000),
    loss=st.sampled_from(["logistic", "squared_hinge"]),
    asynchronous=st.booleans(),
    ranks=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=10)
def test_several_classes_are_fitted_as_each_alone(seed, loss, asynchronous, ranks):
    dense, _ = problem(loss, dtype=np.float32)
    classes = np.random.default_rng(seed).integers(0, 3, ROWS)

    def fitted(comm, targets, width):
        own = np.arange(ROWS) % ranks == comm.rank
        more = {"l1": 0.01, "block": 2, "random_state": seed, "asynchronous": asynchronous}
        chosen = Settings(solver="scd", loss=loss, **more)
        given = Examples(rows_of(dense[own]), targets[own].astype(np.float32), None, width)
        scd = Scd(given, chosen, comm)
        before = comm.traffic.messages_sent
        losses = [scd.epoch().loss for _ in range(2)]
        coordinates, intercepts = scd.read()
        return coordinates, intercepts, np.array(losses), comm.traffic.messages_sent - before

    def run(comm):
        together = fitted(comm, classes, 3)
        alone = [fitted(comm, np.where(classes == k, 1, -1), 1) for k in range(3)]
        for k, one in enumerate(alone):
            assert (together[0][:, k] == one[0][:, 0]).all()
            assert together[1][k] == one[1][0]
            assert together[3] == one[3]
        assert together[2] == pytest.approx(sum(one[2] for one in alone))

    simulate(ranks, run)


def test_an_asynchronous_step_does_not_know_of_the_step_before():
    dense, targets = problem("squared")
    scd = trainer(None, "squared", l2=0.0, block=4, asynchronous=True, fit_intercept=False)
    columns = np.flatnonzero(dense.any(axis=0))
    drawn = draws(0, 0, np.array([0, len(columns)]), scd.steps)
    values, waiting = np.zeros(len(columns)), None
    for step, chosen in enumerate(drawn):
        slopes = dense[:, columns] @ values - targets
        meets = [
            (dense[:, columns[drawn[at]]] != 0).sum(axis=1)
            if 0 <= at < len(drawn)
            else np.zeros(ROWS)
            for at in (step, step - 1, step + 1)
        ]
        own = dense[:, columns[chosen]]
        each = meets[0] * (1 + (meets[1] > 0) + (meets[2] > 0))
        change = chosen, -(own.T @ slopes) / (own.T**2 @ each)
        for late, moved in filter(None, [waiting]):
            values[late] += moved
        waiting = change
    values[waiting[0]] += waiting[1]
    scd.epoch()
    assert scd.values[:, 0] == pytest.approx(values)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_from_a_state_bit_for_bit(asynchronous):
    def run(comm):
        first, second = (
            trainer(comm, "logistic", np.float32, block=2, asynchronous=asynchronous)
            for _ in range(2)
        )
        first.epoch()
        second.restore(first.state())
        assert minimised(second) == pytest.approx(minimised(first))
        losses = [(first.epoch().loss, second.epoch().loss) for _ in range(2)]
        assert first.values.tobytes() == second.values.tobytes()
        return losses

    for losses in simulate(3, run).results:
        assert all(one == two for one, two in losses)
    with pytest.raises(InputError, match="the state has 3 coordinates, and these rows have 14"):
        trainer(None, "logistic").restore({"values": np.zeros((3, 1)), "losses": np.zeros(1)})


def test_bytes_are_those_of_the_messages():
    """Each rank sends its sums in each round, and at the end its loss."""
    ranks, block, rounds = 4, 2, 2

    def run(comm):
        scd = trainer(comm, "squared", np.float32, block=block, l2=0.5)
        before = comm.traffic.bytes_sent
        epoch = scd.epoch()
        sent = comm.traffic.bytes_sent - before
        assert epoch.volume == pytest.approx(sent, rel=0.1)
        slices = np.array(cuts(len(scd.values), ranks))
        return sent, slices, draws(0, 0, slices, scd.steps)

    for sent, slices, drawn in simulate(ranks, run).results:
        assert len(drawn) == np.diff(slices).max()  # few coordinates change one by one
        assert sent == rounds * 8 + sum(rounds * len(chosen) * 2 * 8 for chosen in drawn)


def test_every_coordinate_is_drawn_once_an_epoch_and_evenly():
    for sizes, steps in [((7, 8, 7), 4), ((3, 0, 1), 3), ((1000, 1000), 10)]:
        slices = np.cumsum([0, *sizes])
        drawn = draws(3, 5, slices, steps)
        assert len(drawn) == steps
        assert sorted(np.concatenate(drawn).tolist()) == list(range(slices[-1]))
        counts = np.array([np.diff(np.searchsorted(chosen, slices)) for chosen in drawn])
        assert (np.ptp(counts, axis=0) <= 1).all()
        assert all((np.diff(chosen) > 0).all() for chosen in drawn)
    assert any((a != b).any() for a, b in zip(drawn, draws(3, 6, slices, steps), strict=True))


def test_rows_without_entries_and_models_without_coordinates():
    rows = rows_of(np.zeros((4, 3), np.float32))
    targets = np.array([1, 1, 1, -1], np.float32)
    scd = Scd(Examples(rows, targets), Settings(solver="scd", loss="squared"))
    scd.epoch()
    coordinates, intercept = scd.read()
    assert not coordinates.any()
    assert intercept[0] == pytest.approx(0.5)
    bare = Settings(solver="scd", fit_intercept=False)
    nothing = simulate(3, lambda comm: Scd(Examples(rows, targets), bare, comm).epoch())
    assert [epoch.loss for epoch in nothing.results] == pytest.approx([np.log(2)] * 3)


def test_rows_of_no_weight_do_not_count():
    dense, targets = problem("logistic")
    times = np.arange(ROWS) % 3
    one, two = (
        Scd(Examples(rows_of(x), y, w), Settings(solver="scd", l2=0.1))
        for x, y, w in [
            (dense, targets, times * 1.0),
            (
                np.repeat(dense, times, axis=0),
                np.repeat(targets, times),
                None,
            ),
        ]
    )
    for _ in range(5):
        one.epoch()
        two.epoch()
    assert one.values == pytest.approx(two.values)


def test_settings_are_refused_in_words():
    with pytest.raises(InputError, match="'hinge' is not; take 'squared_hinge'"):
        trainer(None, "hinge")
    with pytest.raises(InputError, match="block must be"):
        trainer(None, "logistic", block=0)
