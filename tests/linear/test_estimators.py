"""The estimators: scikit-learn's own checks, and what they promise beyond."""

import inspect
import pickle
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.datasets import dump_svmlight_file, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from sparcel import simulate
from sparcel.errors import InputError, MismatchError
from sparcel.products.linear import (
    SparseLinearRegression,
    SparseLinearSVC,
    SparseLogisticRegression,
)
from sparcel.products.linear.inputs import as_matrix
from sparcel.products.rows import HashedNGrams, read_svmlight, shard

UNLIKE = [SparseLogisticRegression(), SparseLinearRegression(solver="scd")]
"""Estimators that share least: their kind, their loss and their solver differ."""


@parametrize_with_checks(UNLIKE)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


def test_estimators_share_all_but_what_their_kind_and_their_loss_ask_for():
    added = {
        SparseLogisticRegression: {"predict_proba", "predict_log_proba"},
        SparseLinearSVC: set(),
        SparseLinearRegression: {"_checked_labels", "predict"},
    }
    for kind, names in added.items():
        own = {name for name, value in vars(kind).items() if inspect.isfunction(value)}
        assert {name for name in own if not name.startswith("__")} == {"_loss", *names}
    assert SparseLinearSVC.__bases__ == SparseLogisticRegression.__bases__


def problem(classes: int = 2, rows: int = 400, seed: int = 0):
    X, y = make_classification(
        rows, 12, n_informative=8, n_classes=classes, random_state=seed, class_sep=1.5
    )
    return sp.csr_matrix(X), y


def objective(X, y, coefficients, intercept, l2):
    margins = (X @ coefficients + intercept) * y
    return np.logaddexp(0, -margins).mean() + l2 / 2 * (coefficients**2).sum()


def test_training_to_the_end_reaches_the_optimum():
    X, y = problem()
    model = SparseLogisticRegression(l2=1e-2, epochs=1500, tol=None, eta0=0.3).fit(X, y)
    best = LogisticRegression(C=1 / (1e-2 * 400), tol=1e-10, max_iter=10000).fit(X, y)
    found = objective(X, 2 * y - 1, model.coef_[0], model.intercept_[0], 1e-2)
    least = objective(X, 2 * y - 1, best.coef_[0], best.intercept_[0], 1e-2)
    assert found <= least * (1 + 1e-4)


@pytest.mark.parametrize("model", UNLIKE, ids=str)
def test_entries_of_a_row_and_a_column_are_their_sum(model):
    X, y = problem(rows=100)
    twice = sp.csr_matrix(  # 6x - 5x, and columns in no order
        (
            np.column_stack([6 * X.toarray(), -5 * X.toarray()]).ravel(),
            np.tile([*range(12), *range(12)], 100),
            np.arange(101) * 24,
        ),
        X.shape,
    )
    entries = twice.data.copy()
    found = clone(model).set_params(epochs=5).fit(twice, y)
    expected = clone(model).set_params(epochs=5).fit(X, y)
    assert found.coef_ == pytest.approx(expected.coef_, abs=1e-6)
    assert (twice.data == entries).all()


def test_what_coordinate_descent_does_not_do_is_said_in_words():
    X, y = problem(3)
    with pytest.raises(AttributeError) as error:
        SparseLinearRegression(solver="scd").partial_fit(X, y)
    assert "solver='scd' needs all rows in each step; call fit" in str(error.value.__cause__)
    with pytest.raises(InputError, match="'hinge' is not; take 'squared_hinge'"):
        SparseLinearSVC(solver="scd").fit(X, y > 0)
    with pytest.raises(InputError, match="did you mean 'scd'"):
        SparseLinearSVC(solver="scdd").fit(X, y)


def test_regression_reaches_ridge_regression():
    X, y = problem()
    targets = X @ np.arange(12.0) + 3 + 0.1 * y
    model = SparseLinearRegression(l2=0.05, epochs=3000, tol=None).fit(X, targets)
    ridge = Ridge(alpha=0.05 * 400, tol=1e-10).fit(X.toarray(), targets)
    assert model.coef_ == pytest.approx(ridge.coef_, abs=1e-3)
    assert model.intercept_ == pytest.approx(ridge.intercept_, abs=1e-3)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("solver", ["sgd", "scd"])
@pytest.mark.parametrize(("factor", "shift"), [(2.0**-9, 0.0), (-(2.0**12), 1e4)])
def test_a_regression_does_not_depend_on_the_unit_of_its_targets(solver, ranks, factor, shift):
    X, _ = problem(rows=90)
    own = np.arange(90) % 6 // 2  # as many rows a rank, but other targets
    given = X @ np.arange(12.0) + 5 * own

    def run(comm, targets):
        mine = own == comm.rank if ranks > 1 else slice(None)
        model = SparseLinearRegression(solver=solver, batch_size=10, epochs=30)
        model.fit(X[mine], targets[mine], sample_weight=1 + own[mine], group=comm)
        return np.append(model.coef_, model.intercept_), model.n_iter_

    (one, steps), *_ = simulate(ranks, lambda comm: run(comm, given)).results
    (two, as_many), *_ = simulate(ranks, lambda comm: run(comm, factor * given + shift)).results
    assert steps == as_many
    assert (two - [*[0] * 12, shift]) / factor == pytest.approx(one, rel=1e-4, abs=1e-3)
    assert SparseLinearRegression().fit(X, given).score(X, given) > 0.99


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("solver", ["sgd", "scd"])
def test_a_warm_start_begins_with_the_model_that_is_there(solver, ranks):
    X, y = problem()

    def run(comm):
        own = slice(comm.rank, None, comm.size)
        cold = SparseLogisticRegression(solver=solver, epochs=12, tol=None)
        warm = clone(cold).set_params(warm_start=True, epochs=10)
        for model in (cold, warm):
            model.fit(X[own], y[own], group=comm)
        again = clone(cold).set_params(epochs=2).fit(X[own], y[own], group=comm)
        warm.set_params(epochs=2).fit(X[own], y[own], group=comm)
        assert warm.n_iter_ == 2
        return [model.epochs_[-1].loss for model in (cold, warm, again)]

    for cold, warm, again in simulate(ranks, run).results:
        assert warm == pytest.approx(cold, rel=0.02)
        assert again > 1.1 * cold


@pytest.mark.parametrize(
    ("model", "classes"),
    [
        (SparseLogisticRegression(), 4),
        (SparseLinearSVC(), 2),
        (SparseLinearSVC(loss="squared_hinge", solver="scd"), 4),
    ],
    ids=str,
)
def test_ranks_fit_the_same_model_as_one_another(model, classes):
    X, y = problem(classes, 300)
    names = np.array(["ham", "spam", "tea", "jam"])[y]

    def run(comm):
        # The last rank has no row of the last class.
        own = (np.arange(300) % 3 == comm.rank) & ~((comm.rank == 2) & (y == classes - 1))
        fitted = clone(model).set_params(batch_size=20).fit(X[own], names[own], group=comm)
        return fitted.coef_.tobytes(), (fitted.predict(X) == names).mean(), list(fitted.classes_)

    found = simulate(3, run).results
    assert found == [found[0]] * 3
    assert found[0][1] > 0.8
    assert found[0][2] == sorted(set(names))


def test_a_model_is_pickled_and_goes_on():
    X, y = problem(3)
    one = SparseLogisticRegression(l1=1e-3).partial_fit(X, y, classes=[0, 1, 2])
    two = pickle.loads(pickle.dumps(one))
    for model in (one, two):
        model.partial_fit(X, y)
    assert one.coef_.tobytes() == two.coef_.tobytes()
    assert one.n_iter_ == 2
    assert two.predict_proba(X).sum(axis=1) == pytest.approx(1)


def test_partial_fit_goes_on_from_fit():
    X, y = problem()
    one = SparseLogisticRegression(batch_size=20, epochs=4, tol=None).fit(X, y)
    two = SparseLogisticRegression(batch_size=20, epochs=3, tol=None).fit(X, y).partial_fit(X, y)
    assert two.epochs_[0].loss == pytest.approx(one.epochs_[-1].loss, rel=0.05)
    assert two.coef_ == pytest.approx(one.coef_, abs=0.1)
    other = clone(two).set_params(step="constant", eta0=1e-3).fit(X, y)
    before = other.coef_.copy()
    other.set_params(step="adagrad").sparsify().partial_fit(X, y)
    assert other.coef_ == pytest.approx(before, abs=0.5)


def test_ranks_without_rows_take_part(tmp_path):
    file = tmp_path / "two.svm"
    file.write_text("1 1:1\n-1 2:1\n")

    def run(comm):
        return SparseLogisticRegression().fit(str(file), group=comm).predict(np.eye(2)).tolist()

    assert simulate(3, run).results == [[1, -1]] * 3


def test_rows_without_columns_are_refused(tmp_path):
    file = tmp_path / "labels.svm"
    file.write_text("1\n-1\n")
    for solver, ranks in (("sgd", 2), ("scd", 2)):
        model = SparseLogisticRegression(solver=solver)
        with pytest.raises(ValueError, match=r"0 feature|no columns"):
            simulate(ranks, lambda comm, m=model: clone(m).fit(str(file), group=comm))


def test_ranks_that_do_not_do_the_same_are_told():
    X, y = problem()

    def half_fitted(comm):
        model = SparseLogisticRegression()
        model = model if comm.rank else model.fit(X, y)
        return model.partial_fit(X, y, classes=[0, 1], group=comm)

    with pytest.raises(MismatchError):
        simulate(2, half_fitted)
    with pytest.raises(InputError, match="same settings"):
        simulate(
            2,
            lambda comm: SparseLogisticRegression(step=lambda epoch: 0.1 + comm.rank).fit(
                X, y, group=comm
            ),
        )


def test_what_is_wrong_on_one_rank_is_told_to_all():
    X, y = problem()

    def run(comm, wrong):
        own = X.toarray()
        if comm.rank == 1 and wrong == "NaN":
            own[3, 3] = np.nan
        if comm.rank == 1 and wrong == "too large":
            own = own.astype(object)
            own[3, 3] = 10**400
        seed = comm.rank if wrong == "settings" else 0
        rows = slice(0, 0) if comm.rank == 2 else slice(None)
        weights = {
            "weights": {1: 1.0 + comm.rank},
            "some weights": [None, "balanced", {1: 1.0}][comm.rank],
        }.get(wrong)
        model = SparseLogisticRegression(random_state=seed, epochs=2, class_weight=weights)
        given = np.ones(len(y))[rows]
        return model.fit(own[rows], y[rows], sample_weight=given, group=comm).n_iter_

    with pytest.raises(InputError, match="contains NaN"):
        simulate(3, lambda comm: run(comm, "NaN"))
    with pytest.raises(InputError, match="int too large to convert to float"):
        simulate(3, lambda comm: run(comm, "too large"))
    with pytest.raises(InputError, match="ranks must have the same settings"):
        simulate(3, lambda comm: run(comm, "settings"))
    for wrong in ("weights", "some weights"):
        with pytest.raises(InputError, match="ranks must have the same class_weight"):
            simulate(3, lambda comm, wrong=wrong: run(comm, wrong))
    assert simulate(3, lambda comm: run(comm, "")).results == [2, 2, 2]
    with pytest.raises(InputError, match=r"the loss became (inf|nan)"):
        SparseLinearRegression(step="constant", eta0=1e6, epochs=50).fit(X * 100, y)


def test_a_pipeline_of_text_and_a_sparse_model():
    texts = ["cheap pills now", "meeting at noon", "cheap watches", "lunch at noon"] * 10
    labels = ["spam", "ham", "spam", "ham"] * 10
    model = make_pipeline(CountVectorizer(), SparseLogisticRegression(l1=1e-3)).fit(texts, labels)
    scores = model.decision_function(texts)
    model[-1].sparsify()
    assert sp.issparse(model[-1].coef_)
    assert model.decision_function(texts) == pytest.approx(scores)
    assert list(model.predict(["cheap lunch pills", "noon"])) == ["spam", "ham"]


def test_classes_weigh_what_is_said():
    X, y = problem()
    rare = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:10]])
    recall = [
        (
            SparseLogisticRegression(class_weight=weight).fit(X[rare], y[rare]).predict(X)[y == 1]
        ).mean()
        for weight in (None, "balanced", {1: 1000.0})
    ]
    assert recall == sorted(recall)
    assert recall[0] < recall[2]
    with pytest.raises(InputError, match="class_weight must be None, 'balanced' or a dict"):
        SparseLogisticRegression(class_weight="even").fit(X, y)
    with pytest.raises(InputError, match=r"class_weight has 7, which is none of the classes"):
        SparseLogisticRegression(class_weight={7: 2.0}).fit(X, y)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-1, r"must lie in \[0, 3.4.*e\+38\], got -1"),
        (np.inf, "must lie in .*, got inf"),
        (np.nan, "must lie in .*, got nan"),
        (1e39, r"must lie in .*, got 1e\+39"),
        ("2", "must be a number, got '2'"),
        (None, "must be a number, got None"),
        ([2.0], "must be a number, got list"),
        (10**400, "must be a number that float64 holds, got a larger one"),
    ],
)
def test_weights_of_classes_that_are_none_are_told_to_all_ranks(weight, message):
    X, y = problem(rows=40)

    def run(comm):
        model = SparseLogisticRegression(class_weight={1: 2.0 if comm.rank == 0 else weight})
        model.fit(X.astype(np.float32), y, group=comm)

    with pytest.raises(InputError, match=rf"class_weight\[1\] {message}"):
        simulate(2, run)


def test_a_class_without_weight_does_not_count_in_the_balance():
    X, y = problem(3)
    weights = (y < 2) * 1e307  # as large as sums of them may be
    model = SparseLogisticRegression(class_weight="balanced", epochs=2, tol=None)
    model.fit(X, y, sample_weight=weights / 400)
    assert np.isfinite(model.coef_).all()


def test_one_weight_for_all_rows_is_that_of_each():
    X, y = problem(rows=40)
    one = SparseLogisticRegression(epochs=2).fit(X, y, sample_weight=2)
    each = SparseLogisticRegression(epochs=2).fit(X, y, sample_weight=[2] * 40)
    assert (one.coef_ == each.coef_).all()
    zero_d = SparseLogisticRegression(epochs=2).fit(X, y, sample_weight=np.array(2.0))
    assert (one.coef_ == zero_d.coef_).all()
    for wrong, message in ((-1, "must be at least 0"), ("two", "must be a number, got 'two'")):
        with pytest.raises(InputError, match=f"sample_weight {message}"):
            clone(one).fit(X, y, sample_weight=wrong)
    X = X.astype(np.float32)
    for solver in ("sgd", "scd"):  # their sum made steps of zero
        with pytest.raises(InputError, match="rows add up to more than float32 holds; scale them"):
            clone(one).set_params(solver=solver).fit(X, y, sample_weight=np.full(40, 1e37))


@pytest.mark.parametrize("solver", ["sgd", "scd"])
@pytest.mark.parametrize("epochs", [1, 5])
def test_a_model_that_is_not_finite_is_never_returned(solver, epochs):
    X, y = problem(rows=40)
    model = SparseLogisticRegression(solver=solver, epochs=epochs, tol=None)
    with pytest.raises(InputError, match=r"(loss|model) became (inf|nan|-inf) in"):
        model.fit(X * 1e300, y)
    assert not hasattr(model, "coef_")
    with pytest.raises(InputError, match=r"labels that are finite in float32, got 1e\+39"):
        SparseLinearRegression(solver=solver).fit(X.astype(np.float32), np.where(y, 1e39, 1))


def test_a_training_that_ends_too_early_warns():
    X, y = problem()
    with pytest.warns(ConvergenceWarning, match="after 7 epochs by more than tol=0.001"):
        SparseLinearRegression(epochs=7).fit(X, y * 1000.0)


def test_a_model_that_is_worse_than_none_warns():
    X, _ = problem()
    columns = np.column_stack([X.toarray() + 3, 300 + 5 * X.toarray()])
    with pytest.warns(ConvergenceWarning, match="worse than the mean of the targets: scale"):
        SparseLinearRegression().fit(columns, X @ np.arange(12.0))


def test_steps_grow_with_the_targets_of_later_passes():
    X, _ = problem()
    y = X @ np.arange(12.0)
    model = SparseLinearRegression().partial_fit(X[:1], y[:1] / 1e3)
    for _ in range(30):
        model.partial_fit(X, y)
    assert model.score(X, y) > 0.9
    model.set_params(warm_start=True).fit(X, 1e3 * y)
    assert model.score(X, 1e3 * y) > 0.9


def test_more_dimensions_than_memory_holds():
    texts = ["cheap pills now", "meeting at noon", "cheap watches", "lunch at noon"] * 10
    rows = HashedNGrams(dimensions=2**40).rows(texts, ["spam", "ham", "spam", "ham"] * 10)

    def run(comm):
        model = SparseLogisticRegression(epochs=20).fit(shard(rows, comm.rank, 2), group=comm)
        assert model.coef_.shape == (1, 2**40)
        with pytest.raises(InputError, match="leave it sparse"):
            model.densify()
        with pytest.raises(InputError, match="can't be held whole, as partial_fit does"):
            model.partial_fit(rows)
        with pytest.raises(InputError, match="with algorithm='sharded'"):
            clone(model).set_params(algorithm="auto").fit(rows, group=comm)
        return list(pickle.loads(pickle.dumps(model)).predict(rows)[:2])

    assert simulate(2, run).results == [["spam", "ham"]] * 2
    several = SparseLinearSVC(epochs=20).fit(replace(rows, labels=np.arange(40) % 4))
    assert list(several.predict(rows)[:4]) == [0, 1, 2, 3]
    alone = SparseLinearRegression(epochs=20).fit(replace(rows, labels=np.arange(40) % 2))
    assert (alone.predict(rows) > 0.5).tolist() == [False, True] * 20


def test_labels_that_do_not_fit_are_answered_in_words():
    X, y = problem()
    model = SparseLogisticRegression().partial_fit(X, y)
    with pytest.raises(InputError, match=r"label .*2.* is none of the classes \[0, 1\]"):
        model.partial_fit(X, y + 1)
    with pytest.raises(InputError, match=r"classes must be those of the first call, \[0, 1\], got"):
        model.partial_fit(X, y, classes=[0, 1, 2])
    model.partial_fit(X, y, classes=[1, 0])
    with pytest.raises(InputError, match=r"at least two classes, got \[0\]"):
        SparseLinearSVC().fit(X, y * 0)

    def kinds(comm):
        labels = y if comm.rank else np.array(["a", "b"])[y]
        SparseLogisticRegression().fit(X, labels, group=comm)

    with pytest.raises(InputError, match="labels of different kinds"):
        simulate(2, kinds)


def test_rows_and_files_bring_their_labels(tmp_path):
    X, y = problem(rows=200)
    file = tmp_path / "rows.svm"
    dump_svmlight_file(X, y, str(file), zero_based=False)
    expected = SparseLogisticRegression(epochs=3).fit(X.astype(np.float32), y)
    rows = read_svmlight(file)
    for data in (file, str(file), rows):
        found = SparseLogisticRegression(epochs=3).fit(data)
        assert found.coef_ == pytest.approx(expected.coef_, abs=1e-4)
        assert (found.predict(rows) == found.predict(X)).all()

    def run(comm):
        return SparseLogisticRegression(epochs=3).fit(file, group=comm).n_features_in_

    assert simulate(3, run).results == [12, 12, 12]


def test_a_shard_becomes_a_matrix_without_a_copy():
    whole = HashedNGrams(dimensions=1000).rows(["some words", "and more of them"] * 50)
    for rank in range(4):
        rows = shard(whole, rank, 4)
        matrix, _ = as_matrix(rows)
        assert (matrix @ np.ones(1000) == np.add.reduceat(rows.values, rows.offsets[:-1])).all()
        for own, given in ((matrix.data, rows.values), (matrix.indices, rows.columns)):
            assert np.shares_memory(own, given)
