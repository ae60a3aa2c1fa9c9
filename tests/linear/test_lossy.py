"""Gradients of which a rank sends a part, or few bits: what is lost, kept and restored."""

import re
from copy import deepcopy

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import simulate
from sparcel.core.formats import FewBits
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError
from sparcel.products.linear import SparseLogisticRegression
from sparcel.products.linear.batches import TAIL
from sparcel.products.linear.gradient_descent import prepare
from sparcel.products.linear.model import read_arrays, write_arrays
from sparcel.products.linear.replicated import Owed
from sparcel.products.linear.sharded import RoundedEncoding
from sparcel.products.linear.trainer import Examples, Settings
from sparcel.products.linear.weights import Weights
from tests.linear.reference import random_rows, rows_of

DIMENSIONS = 50
SUMS = ("auto", "split_allgather")
LOSSY = [
    {"algorithm": "auto", "density": 0.1},
    {"algorithm": "ring", "density": 0.3, "asynchronous": True},
    {"algorithm": "split_allgather", "density": 0.2, "bits": 4},
    {"algorithm": "split_allgather", "bits": 8, "format": "raw"},
    {"algorithm": "sharded", "bits": 4},
    {"algorithm": "sharded", "bits": 8, "asynchronous": True},
]


def trained(comm, epochs=1, rows=40, classes=2, state=None, **more):
    """Train on a rank's own rows; return the trainer and its states after each epoch."""
    settings = Settings(epochs=epochs, tol=None, l2=0.0, **{"batch_size": 4, **more})
    dense = random_rows(comm.rank, rows, DIMENSIONS)
    truth = np.random.default_rng(7).standard_normal((DIMENSIONS, classes))
    targets = (dense @ truth).argmax(axis=1).astype(np.float32)
    width, targets = (1, 2 * targets - 1) if classes == 2 else (classes, targets)
    sgd = prepare(Examples(rows_of(dense), targets, None, width), settings, comm)
    if state is not None:
        sgd.restore(state(comm))
    states = []
    sgd.train(lambda epoch: states.append(deepcopy(sgd.state())))
    return sgd, states


def model_of(sgd):
    coordinates, intercepts = sgd.read()
    return coordinates.tobytes(), intercepts.tolist(), sgd.losses


@given(st.integers(0, 1000), st.sampled_from([1, 3]), st.integers(1, 60))
def test_what_is_sent_and_what_is_owed_are_the_gradient_and_what_was_owed(seed, width, most):
    random = np.random.default_rng(seed)
    owed = Owed(Weights(DIMENSIONS, width), most)
    shape = () if width == 1 else (width,)
    for _ in range(4):
        columns = np.sort(random.choice(DIMENSIONS, random.integers(1, 40), replace=False))
        gradient = random.integers(-9, 9, (len(columns), *shape)).astype(np.float32)
        due = owed.values.numpy().copy()
        due[columns] += gradient
        sent, values = owed.take(torch.from_numpy(columns.astype(np.int32)), torch.tensor(gradient))
        assert len(sent) <= most
        assert (np.diff(sent.numpy()) > 0).all()
        assert (values.numpy() == due[sent.numpy()]).all()
        kept = np.setdiff1d(columns, sent.numpy())
        size = np.linalg.norm(due.reshape(DIMENSIONS, -1), axis=1)
        assert size[kept].max(initial=0) <= size[sent.numpy()].min(initial=np.inf)
        due[sent.numpy()] = 0
        assert (owed.values.numpy() == due).all()


@given(st.sampled_from([1, 2, 3, 5]), st.sampled_from(["auto", "ring", "split_allgather"]))
@hypothesis.settings(max_examples=8)
@pytest.mark.parametrize("classes", [2, 3])
def test_sending_all_takes_the_steps_of_sending_without_loss(classes, ranks, algorithm):
    def run(comm, density):
        more = {"algorithm": algorithm, "density": density, "classes": classes, "rows": 12}
        return model_of(trained(comm, 2, **more)[0])

    lossless, whole = (
        simulate(ranks, lambda comm, d=density: run(comm, d)).results for density in (None, 1)
    )
    assert whole == lossless


@given(st.sampled_from([1, 2, 3, 5]), st.sampled_from([8, 4]), st.sampled_from([None, 0.1, 0.5]))
@hypothesis.settings(max_examples=10)
@pytest.mark.parametrize("algorithm", ["sharded", *SUMS])
def test_a_step_is_within_the_bound_of_rounding(algorithm, ranks, bits, density):
    """What ranks still owe makes the sum exact up to the rounding; the tail is exact."""
    density = None if algorithm == "sharded" else density
    one = {"loss": "hinge", "step": "constant", "eta0": 1.0, "batch_size": 40, "rows": 40}

    def run(comm, **more):
        sgd, states = trained(comm, algorithm=algorithm, **one, **more)
        coordinates, intercept = sgd.read()
        columns, owed = (states[-1].get(name, np.zeros(0)) for name in ("owed_columns", "owed"))
        due = np.bincount(columns.astype(int), owed, DIMENSIONS)
        own = np.abs(random_rows(comm.rank, 40, DIMENSIONS)).sum(axis=0).max()
        return coordinates[:, 0] * -40 * comm.size, due, intercept, sgd.losses, float(own)

    exact = simulate(ranks, run).results
    rounded = simulate(ranks, lambda comm: run(comm, density=density, bits=bits)).results
    # Rounding changes a value by at most the largest one over the levels; the sum is rounded too.
    levels = 2 ** (bits - 1) - 1
    most = 0.01 + (2 + 1 / levels) * sum(own for *_, own in exact) / levels * (density is None)
    owed = rounded[0][1]  # rank 0 gets what all owe
    for (total, _, *rest, _), (expected, _, *same, _) in zip(rounded, exact, strict=True):
        assert rest == same
        assert np.abs(total + owed - expected).max() <= most
        assert (total == rounded[0][0]).all()


@pytest.mark.parametrize("more", LOSSY, ids=str)
def test_a_training_goes_on_from_a_checkpoint_bit_by_bit(tmp_path, more):
    file = tmp_path / "state.npz"

    def state(comm):
        return read_arrays(file, "checkpoint")[1] if comm.rank == 0 else {}

    def run(comm, state=None):
        sgd, states = trained(comm, 4, state=state, **more)
        if state is None and comm.rank == 0:
            write_arrays(file, "checkpoint", {}, states[1])
        return model_of(sgd)

    expected = simulate(3, run).results
    assert expected == [expected[0]] * 3
    assert simulate(3, lambda comm: run(comm, state)).results == expected


@pytest.mark.parametrize("more", LOSSY, ids=str)
def test_training_lowers_the_loss_and_sends_less(more):
    def run(comm, **settings):
        sgd, _ = trained(comm, 8, rows=200, batch_size=100, **settings)
        sent = comm.traffic.volume
        sgd.epoch()
        return sgd.losses, comm.traffic.volume - sent

    exact = {**more, "density": None, "bits": None}
    for (losses, volume), (best, most) in zip(
        *(simulate(4, lambda comm, s=one: run(comm, **s)).results for one in (more, exact)),
        strict=True,
    ):
        assert losses[-1] < 0.9 * losses[0]
        assert losses[-1] < best[-1] * 1.5
        assert volume < most


@given(st.lists(st.integers(0, 100), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 99))
@hypothesis.settings(max_examples=10)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pushed_values_are_rounded_and_tails_are_not(dtype, bits, counts, width, seed):
    random = np.random.default_rng(seed)
    values, tails = (
        [random.standard_normal((length, width)).astype(dtype) for length in lengths]
        for lengths in (counts, [TAIL] * len(counts))
    )
    encoding = RoundedEncoding(
        width, np.dtype(dtype), FewBits(bits, 512, "float32", stochastic=True, seed=seed)
    )
    parts = [encoding.pack(one, tail, 3, 7) for one, tail in zip(values, tails, strict=True)]
    assert list(map(len, parts)) == list(map(encoding.length, counts))
    found = encoding.unpack(np.concatenate(parts), counts)
    ends = np.cumsum([length for count in counts for length in (count, TAIL)])
    assert ends[-1] == len(found)
    for i, part in enumerate(np.split(found, ends[:-1])):
        exact = (values, tails)[i % 2][i // 2]
        step = np.abs(exact).max(initial=0) / (2 ** (bits - 1) - 1)
        assert np.abs(part - exact).max(initial=0) <= (0 if i % 2 else step * 1.001)
    assert (parts[0] == encoding.pack(values[0], tails[0], 3, 7)).all()


def test_pushes_are_rounded_otherwise_at_each_step_and_place_and_right_on_average():
    values, tail = np.linspace(-1, 1, 64, dtype=np.float32)[:, None], np.zeros((TAIL, 1), "f4")
    encoding = RoundedEncoding(1, values.dtype, FewBits(4, 512, "float32", stochastic=True, seed=1))

    def rounded(step, place):
        return encoding.unpack(encoding.pack(values, tail, step, place), [64])[:-TAIL, 0]

    found = np.array([[rounded(step, place) for place in (0, 64, 128)] for step in range(200)])
    assert len(np.unique(found.reshape(-1, 64), axis=0)) == 600
    # The standard deviation of a rounding is at most half a level, 1 / 14; this is six times that.
    assert np.abs(found.mean(axis=(0, 1)) - values[:, 0]).max() < 6 / 14 / 600**0.5


def test_no_two_values_of_a_step_are_rounded_by_the_same_random_number(monkeypatch):
    places, pack = [], RoundedEncoding.pack

    def noting(self, values, tail, step, place):
        places.extend((step, place + number) for number in range(len(values)))
        return pack(self, values, tail, step, place)

    monkeypatch.setattr(RoundedEncoding, "pack", noting)
    simulate(3, lambda comm: trained(comm, algorithm="sharded", bits=4))
    assert len(set(places)) == len(places) > 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_sums_are_rounded_otherwise_at_each_step_and_right_on_average(ranks):
    values = np.linspace(-1, 1, DIMENSIONS, dtype=np.float32)

    def run(comm):
        model = trained(comm, 1, algorithm="split_allgather", bits=4, rows=2)[0].model
        stream = SparseStream.from_dense(torch.from_numpy(np.pad(values, (0, TAIL))))
        found = []
        for step in range(200):
            model.weights.steps = step
            found.append(comm.run(lambda: model._sum(stream)).to_dense()[:-TAIL].numpy())
        return np.array(found)

    for found in simulate(ranks, run).results:
        assert len(np.unique(found, axis=0)) == 200
        error = found.mean(axis=0) / ranks - values
        assert np.abs(error).max() < 6 * 2 / 14 / 200**0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.1}, "density=0.1 goes with algorithm='allgather' or 'auto' or"),
        ({"density": 0.1, "algorithm": "dense"}, "got 'dense'; choose one of these"),
        ({"bits": 8, "algorithm": "ring"}, "'sharded' or 'split_allgather', got 'ring'"),
        ({"density": 5, "algorithm": "auto"}, "for a percentage pass density=0.05"),
        ({"bits": 2}, "bits must be 8, 4 or None for all, got 2"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Settings(**settings)


def test_sums_of_several_classes_are_not_rounded():
    with pytest.raises(InputError, match=r"bits=8 goes with one class .* got 3 classes"):
        simulate(2, lambda comm: trained(comm, classes=3, algorithm="auto", bits=8))
    simulate(2, lambda comm: trained(comm, classes=3, algorithm="sharded", bits=8))


def test_a_pass_over_more_rows_does_not_forget_what_is_owed():
    with pytest.raises(AttributeError) as error:
        SparseLogisticRegression(density=0.1, algorithm="auto").partial_fit(np.eye(2), [0, 1])
    assert "partial_fit forgets what density=0.1" in str(error.value.__cause__)
