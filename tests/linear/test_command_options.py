"""Options of ``sparcel linear fit``: weights, the intercept, and what broken files are told."""

import gzip
import inspect
import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from sparcel import simulate
from sparcel.errors import InputError
from sparcel.products.linear import SparseLogisticRegression
from sparcel.products.linear.inputs import read, read_weights
from sparcel.products.linear.model import Coordinates, LinearModel
from sparcel.products.linear.parameters import OF_ONE_SOLVER, Parameters
from sparcel.products.rows import SvmLight
from sparcel.products.rows.cache import START
from sparcel.tools.cli.linear import fit, layout_of
from sparcel.tools.cli.options import descriptions
from tests.linear.command import sparcel


def test_estimators_and_the_command_have_the_settings_and_defaults_of_one_description():
    names = [one.name for one in fields(Parameters)]
    assert list(descriptions(Parameters)) == names
    assert all(descriptions(Parameters).values())
    options = inspect.signature(fit).parameters
    for one in fields(Parameters):
        assert options[one.name].default == getattr(SparseLogisticRegression(), one.name)
    assert {name for own in OF_ONE_SOLVER.values() for name in own} <= set(names)


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_names_tell_what_files_hold_also_compressed_ones(packed):
    for name, layout in {"a.tsv": "tsv", "a.jsonl": "jsonl", "a.svm": "svmlight"}.items():
        assert layout_of([Path(name + packed)], None) == layout


def test_rows_that_weigh_more_count_as_if_they_were_there_more_often(tmp_path, svmlight):
    weights, model, other = (tmp_path / name for name in ("weights", "one.npz", "two.npz"))
    lines = svmlight.read_text().splitlines()
    times = np.random.default_rng(0).integers(0, 3, len(lines)).tolist()
    weights.write_text("".join(f"{count}\n" for count in times))
    more = tmp_path / "more.svm"
    more.write_text("".join(f"{line}\n" * n for line, n in zip(lines, times, strict=True)))
    settings = ("--solver", "scd", "--l2", 0.1, "--epochs", 30, "--tol", "none")
    sparcel("fit", svmlight, *settings, "--weights", weights, "--out", model)
    sparcel("fit", more, *settings, "--out", other)
    one, two = (LinearModel.load(file).coordinates for file in (model, other))
    assert one.dense() == pytest.approx(two.dense(), abs=1e-4)
    assert np.abs(one.dense()).max() > 0.1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1\n" * 299, "has 299 weights, and there are 300 rows"),
        ("", "has 0 weights, and there are 300 rows"),
        ("1\n-1\n", "weights:2: a weight must be a number of at least 0, got '-1'"),
        ("1\n2\ntwo\n", "weights:3: a weight must be a number of at least 0, got 'two'"),
        ("1_0\n", "weights:1: a weight must be a number of at least 0, got '1_0'"),
        ("1\n\n", "weights:2: a weight must be a number of at least 0, got ''"),
        ("inf\n", "weights:1: a weight must be a number of at least 0, got 'inf'"),
        ("nan\n", "weights:1: a weight must be a number of at least 0, got 'nan'"),
        ("0\n" * 300, "the weights of all rows are zero"),
        (None, "there is no file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, svmlight, content, message):
    weights = tmp_path / "weights"
    if content is not None:
        weights.write_text(content)
    with pytest.raises(InputError, match=message):
        sparcel("fit", svmlight, "--weights", weights, "--out", tmp_path / "model.npz")


def test_each_rank_gets_the_weights_of_its_own_rows(tmp_path):
    weights, source = tmp_path / "weights", SvmLight()
    plain, packed = tmp_path / "rows.svm", tmp_path / "more.svm.gz"
    plain.write_text("".join(f"{row} 1:1\n" for row in range(50)))
    packed.write_bytes(gzip.compress("".join(f"{row} 1:1\n" for row in range(50, 70)).encode()))
    weights.write_text("".join(f"{row}\n" for row in range(70)))

    def run(comm, files, cache):
        rows = read(source, files, comm, cache)
        return (read_weights(weights, rows, files, cache, comm) == rows.labels).all()

    files = [packed, plain]
    weights.write_text("".join(f"{row}\n" for row in [*range(50, 70), *range(50)]))
    assert simulate(1, lambda comm: run(None, files, None)).results == [True]
    assert all(simulate(3, lambda comm: run(comm, files, tmp_path / "cache")).results)
    with pytest.raises(InputError, match="give --cache, or files that are not compressed"):
        simulate(3, lambda comm: run(comm, files, None))
    weights.write_text("".join(f"{row}\n" for row in range(50)))
    assert all(simulate(3, lambda comm: run(comm, [plain], None)).results)


def test_a_checkpoint_is_of_its_weights(tmp_path, svmlight):
    weights = tmp_path / "weights"
    weights.write_text("1\n" * 300)
    base = ("fit", svmlight, "--weights", weights, "--checkpoint", tmp_path / "state.npz")
    sparcel(*base, "--epochs", 1, "--out", tmp_path / "model.npz")
    weights.write_text("2\n" + "1\n" * 299)
    with pytest.raises(InputError, match="is of a training with other settings, data"):
        sparcel(*base, "--resume", "--out", tmp_path / "model.npz")


@pytest.mark.parametrize("solver", ["sgd", "scd"])
def test_a_model_can_do_without_an_intercept(tmp_path, svmlight, solver):
    model = tmp_path / "model.npz"
    for option, has_one in (("--fit-intercept", True), ("--no-fit-intercept", False)):
        sparcel("fit", svmlight, "--solver", solver, "--epochs", 3, option, "--out", model)
        assert (LinearModel.load(model).coordinates.intercepts != 0).all() == has_one


def test_training_ends_when_the_loss_no_longer_falls_unless_told_otherwise(tmp_path, svmlight):
    base = ("fit", svmlight, "--batch-size", 5, "--l2", 0.1, "--out", tmp_path / "model.npz")

    def epochs(*options):
        told = sparcel(*base, *options).splitlines()
        return sum(line.split()[0].isdecimal() for line in told)

    assert 5 < epochs() < 60
    assert epochs("--tol", "none", "--epochs", 60) == 60
    with pytest.raises(InputError, match="tol must be at least 0"):
        sparcel(*base, "--tol", -1)


def test_probabilities_of_a_model_that_has_none_leave_no_file(tmp_path, svmlight):
    model, out = tmp_path / "model.npz", tmp_path / "labels"
    sparcel("fit", svmlight, "--loss", "hinge", "--epochs", 1, "--out", model)
    with pytest.raises(InputError, match="a model of the hinge loss has no probabilities"):
        sparcel("predict", model, svmlight, "--probabilities", "--out", out)
    assert not out.exists()


def test_a_flipped_bit_of_a_cache_is_told_and_a_truncated_cache_is_made_anew(tmp_path, svmlight):
    cache, one, two = (tmp_path / name for name in ("cache", "one.npz", "two.npz"))
    base = ("fit", svmlight, "--epochs", 2, "--cache", cache, "--out")
    sparcel(*base, one)
    whole = cache.read_bytes()
    header = json.loads(whole[START.unpack_from(whole)[3] :])
    for name, entry in header["arrays"].items():
        broken = bytearray(whole)
        broken[entry["place"] + 8] ^= 1
        cache.write_bytes(broken)
        with pytest.raises(InputError, match=f"is broken: the checksum of its {name} is wrong"):
            sparcel(*base, two)
    cache.write_bytes(whole[:-10])
    sparcel(*base, two)
    assert one.read_bytes() == two.read_bytes()
    assert cache.read_bytes() == whole


def test_a_model_with_a_flipped_bit_is_the_same_or_refused(tmp_path):
    path, random = tmp_path / "model.npz", np.random.default_rng(0)
    coordinates = Coordinates(None, np.arange(3.0)[:, None], np.ones(1), 3)
    LinearModel(coordinates, "logistic", np.array(["a", "b"])).save(path)
    whole = path.read_bytes()
    for at, bit in random.integers(0, (len(whole), 8), (200, 2)):
        broken = bytearray(whole)
        broken[at] ^= 1 << bit
        path.write_bytes(broken)
        with suppress(InputError):
            found = LinearModel.load(path)
            assert found.coordinates.dense().tolist() == coordinates.dense().tolist()
            assert (found.loss, found.classes.tolist()) == ("logistic", ["a", "b"])


def test_a_link_to_itself_is_told_wherever_it_is_given(tmp_path, svmlight):
    loop, model = tmp_path / "loop", tmp_path / "model.npz"
    loop.symlink_to(loop)
    for option in ("--out", "--cache", "--checkpoint"):
        with pytest.raises(InputError, match="loop: it is a link that leads back to itself"):
            sparcel("fit", svmlight, option, loop)
    with pytest.raises(InputError, match="loop is a link that leads to no file"):
        sparcel("fit", loop, "--out", model)
    with pytest.raises(InputError, match="loop is no model of sparcel linear"):
        sparcel("predict", loop, svmlight)
