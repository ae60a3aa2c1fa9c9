"""SGD on several ranks: what one rank would do with all their rows."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel import simulate
from sparcel.core.collectives import ALGORITHMS
from sparcel.errors import InputError, MismatchError
from sparcel.products.linear.batches import TAIL, by_frequency
from sparcel.products.linear.gradient_descent import prepare
from sparcel.products.linear.parameters import RULES, StepSizes
from sparcel.products.linear.trainer import Examples, Settings
from tests.linear.reference import DenseModel, random_rows, rows_of

DIMENSIONS = 50


def own_rows(rank: int, rows: int):
    """Return a rank's rows and targets: small whole numbers, so that sums are exact."""
    targets = np.random.default_rng(rank).choice([-1.0, 1.0], rows).astype(np.float32)
    return rows_of(random_rows(rank, rows, DIMENSIONS)), targets


def fitted(comm, rows: int, settings: Settings):
    """Train on a rank's own rows; return the model and the losses of the epochs."""
    found, targets = own_rows(0 if comm is None else comm.rank, rows)
    sgd = prepare(Examples(found, targets), settings, comm)
    sgd.train()
    coordinates, intercepts = sgd.read()
    return coordinates.tobytes(), intercepts.tolist(), sgd.losses


def exact(**more) -> Settings:
    """Return settings with which all numbers stay short binary fractions."""
    return Settings(
        loss="hinge", l2=0.0, step="constant", eta0=0.25, batch_size=4, epochs=2, tol=None, **more
    )


@pytest.mark.parametrize(("ranks", "rows"), [(2, 16), (8, 4)])  # dividing by them is exact
@pytest.mark.parametrize("algorithm", [*sorted(ALGORITHMS.keys() - {"dense"}), "auto", "sharded"])
def test_every_algorithm_gives_the_model_and_the_losses_of_dense_sums(algorithm, ranks, rows):
    dense = simulate(ranks, lambda comm: fitted(comm, rows, exact(algorithm="dense"))).results
    other = simulate(ranks, lambda comm: fitted(comm, rows, exact(algorithm=algorithm))).results
    assert dense == other == [dense[0]] * ranks


@pytest.mark.parametrize("step", RULES)
@pytest.mark.parametrize(("algorithm", "asynchronous"), [("auto", False), ("sharded", True)])
def test_ranks_take_the_steps_of_a_dense_model(algorithm, step, asynchronous):
    counts, size = [7, 0, 12], 5
    settings = Settings(
        l2=0.0 if step == "adagrad" else 0.01,
        step=step,
        batch_size=size,
        epochs=3,
        tol=None,
        asynchronous=asynchronous,
        algorithm=algorithm,
    )

    def run(comm):
        rows, targets = own_rows(comm.rank, counts[comm.rank])
        sgd = prepare(Examples(rows, targets), settings, comm)
        sgd.train()
        order = np.random.default_rng([settings.random_state, comm.rank]).permutation(len(rows))
        return -(-len(rows) // size), order, np.append(*sgd.read())

    found = simulate(3, run).results
    model = DenseModel("logistic", 0.0, settings.l2, step == "adagrad", np.zeros(DIMENSIONS))
    sizes, steps = StepSizes(step, 0.5), max(batches for batches, *_ in found)
    for epoch in range(3):
        pending, losses = [], 0.0
        for at in range(steps):
            chosen, targets = [np.zeros((0, DIMENSIONS))], [np.zeros(0)]
            for rank, (batches, order, _) in enumerate(found):
                if at < batches:
                    nth = np.random.default_rng([0, epoch]).permutation(batches)[at]
                    cut = [b * counts[rank] // batches for b in range(batches + 1)]
                    rows = order[cut[nth] : cut[nth + 1]]
                    chosen.append(random_rows(rank, counts[rank], DIMENSIONS)[rows])
                    targets.append(own_rows(rank, counts[rank])[1][rows])
            taken = np.concatenate(chosen), np.concatenate(targets)
            gradient, slope, loss = model.gradient(*taken, np.ones(len(taken[0])))
            losses += loss
            pending.append((gradient / len(taken[0]), slope / len(taken[0]), at))
            if len(pending) > asynchronous:
                *mean, before = pending.pop(0)
                model.step(*mean, sizes.at(epoch + before / steps))
        for *mean, before in pending:
            model.step(*mean, sizes.at(epoch + before / steps))
        sizes.epoch_ended(losses / sum(counts))
    for *_, model_of_rank in found:
        assert (model_of_rank == found[0][2]).all()
        assert model_of_rank == pytest.approx(np.append(model.weights, model.intercept), abs=1e-4)


def test_bold_driver_grows_while_the_loss_falls():
    sizes = StepSizes("bold_driver", 1.0)
    found = []
    for loss in (3.0, 2.0, 2.5, 1.0):
        sizes.epoch_ended(loss)
        found.append(sizes.at(0.0))
    assert found == pytest.approx([1.05, 1.05**2, 1.05**2 / 2, 1.05**3 / 2])


def test_a_function_gives_the_sizes_of_steps():
    assert StepSizes(lambda epochs: 3 / (1 + epochs), 99.0).at(2.0) == 1.0
    with pytest.raises(InputError, match="finite and not negative, got -1"):
        StepSizes(lambda epochs: -1.0, 1.0).at(0.0)
    with pytest.raises(InputError, match="did you mean 'adagrad'"):
        StepSizes("adagrd", 1.0)


def test_no_rows_and_unlike_rows_are_told_to_all_ranks():
    settings = Settings()

    def run(comm, rows, dimensions):
        found = replace(rows_of(np.ones((rows, 3), np.float32)), dimensions=dimensions)
        prepare(Examples(found, np.ones(rows, np.float32)), settings, comm)

    with pytest.raises(InputError, match="there are no rows to fit a model to"):
        simulate(3, lambda comm: run(comm, 0, 3))
    with pytest.raises(InputError, match=r"agree in dimensions of their rows, got \[3, 4, 5\]"):
        simulate(3, lambda comm: run(comm, 2, 3 + comm.rank))


def test_averages_that_would_be_wrong_are_refused():
    for step in ("constant", "adagrad"):
        with pytest.raises(InputError, match="average=True goes with l1=0"):
            Settings(average=True, step=step, l1=0.1)


@pytest.mark.parametrize("algorithm", ["auto", "sharded"])
def test_an_average_at_the_defaults_is_that_of_the_models_after_each_step(algorithm):
    settings = Settings(batch_size=3, epochs=3, tol=None, algorithm=algorithm)

    def run(comm):
        averaged, single = (
            prepare(Examples(*own_rows(comm.rank, 10)), replace(settings, average=a), comm)
            for a in (True, False)
        )
        models = []
        for _ in range(3):
            averaged.epoch()
            single.epoch(lambda _: models.append(np.append(*single.read())))
        return np.append(*averaged.read()), np.mean(models, axis=0)

    for found, expected in simulate(3, run).results:
        assert found == pytest.approx(expected, abs=1e-5)


def test_training_ends_when_the_loss_no_longer_falls():
    rows, targets = own_rows(0, 40)
    settings = Settings(batch_size=1, epochs=1000, tol=1e-3, l2=0.1)
    sgd = prepare(Examples(rows, targets), settings)
    sgd.train()
    assert 5 < sgd.epochs < 1000


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [3])
def test_real_processes_agree_with_the_simulated_cluster(run_on, world_size):
    few = ({"algorithm": "auto", "density": 0.2, "bits": 4}, {"algorithm": "sharded", "bits": 8})
    for more in ({"algorithm": "auto"}, {"algorithm": "sharded"}, *few):
        settings = exact(asynchronous=True, **more)
        expected = simulate(world_size, lambda comm, s=settings: fitted(comm, 20, s)).results
        assert run_on(world_size, fitted, 20, settings) == expected


@pytest.mark.parametrize("algorithm", ["auto", "sharded"])
@pytest.mark.parametrize(
    "more",
    [
        {"step": "adagrad"},
        {"step": "inverse"},
        {"step": "constant", "average": True},
        {"average": True},
        {"step": "bold_driver", "eta0": 8.0},  # the loss rises and falls
    ],
    ids=str,
)
def test_a_training_goes_on_from_a_state_bit_by_bit(algorithm, more):
    settings = Settings(batch_size=3, epochs=6, tol=None, algorithm=algorithm, l2=0.01, **more)

    def run(comm, state):
        sgd = prepare(Examples(*own_rows(comm.rank, 10)), settings, comm)
        if state is not None:
            sgd.restore(state)
        states = []
        sgd.train(lambda epoch: states.append(deepcopy(sgd.state())))
        coordinates, intercepts = sgd.read()
        return coordinates.tobytes(), intercepts.tolist(), sgd.losses, states

    *expected, states = simulate(3, lambda comm: run(comm, None)).results[0]
    *resumed, _ = simulate(3, lambda comm: run(comm, states[1])).results[0]
    assert resumed == expected


def test_ranks_that_get_out_of_step_are_told():
    settings = Settings(batch_size=5, l2=0.0)

    def run(comm):
        sgd = prepare(Examples(*own_rows(comm.rank, 20)), settings, comm)
        return sgd.read() if comm.rank else sgd.epoch()

    with pytest.raises(MismatchError, match=r"read\(\).*number of columns\(\)"):
        simulate(2, run)


@given(seed=st.integers(0, 1000), dimensions=st.sampled_from([50, 2**40]))
def test_rows_of_some_columns_give_the_same_products(seed, dimensions):
    dense = random_rows(seed, 9, 50)
    rows = replace(rows_of(dense), dimensions=dimensions)
    columns = np.random.default_rng(seed).choice(50, seed % 20, replace=False)
    columns.sort()
    found = rows.among(columns)
    again = np.zeros((9, len(columns)), np.float32)
    again[np.repeat(np.arange(9), np.diff(found.offsets)), found.columns] = found.values
    assert (again == dense[:, columns]).all()


def test_a_sharded_model_sends_two_values_for_each_column_of_a_batch():
    settings = Settings(batch_size=5, epochs=2, tol=None, l2=0.0)

    def run(comm):
        sgd = prepare(Examples(*own_rows(comm.rank, 20)), settings, comm)
        sgd.epoch()
        return sgd.epoch().volume, sum(len(b.columns) - TAIL for b in sgd.batches), len(sgd.batches)

    found = simulate(4, run).results
    most = 2 * 4 * max(columns for _, columns, _ in found) + 4 * 3 * TAIL * found[0][2]
    assert all(volume <= most for volume, *_ in found)


@given(seed=st.integers(0, 1000), dimensions=st.sampled_from([50, 2**32]))
def test_frequent_columns_come_first(seed, dimensions):
    rows = replace(rows_of(random_rows(seed, 20, 50)), dimensions=dimensions)
    numbering = by_frequency(rows)
    columns, numbered = numbering.columns, numbering.numbered(rows)
    counts = np.bincount(numbered.columns, minlength=len(columns))
    assert (np.diff(counts) <= 0).all()
    assert (counts > 0).all()
    assert (columns[numbered.columns] == rows.columns).all()


@pytest.mark.parametrize("algorithm", ["auto", "sharded"])
def test_a_process_alone_fits_the_model_of_one_rank(algorithm):
    settings = exact(algorithm=algorithm)
    assert simulate(1, lambda comm: fitted(comm, 32, settings)).results == [
        fitted(None, 32, settings)
    ]
