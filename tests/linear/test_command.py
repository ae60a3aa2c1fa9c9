"""The command ``sparcel linear``: from files to a model, its use, and what goes wrong."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from sparcel import simulate
from sparcel.errors import InputError
from sparcel.products.linear.inputs import read
from sparcel.products.linear.model import Coordinates, LinearModel
from sparcel.products.rows import SvmLight
from tests.linear.command import measures, sparcel


@pytest.mark.parametrize("loss", ["logistic", "squared_hinge"])
def test_a_model_is_fitted_evaluated_and_used(tmp_path, svmlight, loss):
    model = tmp_path / "model.npz"
    told = sparcel(
        "fit", svmlight, "--loss", loss, "--epochs", 20, "--out", model, "--batch-size", 50
    )
    assert "Data: 300 rows, 40 dimensions, 8.0 entries a row, 2 classes; one process" in told
    assert told.count(" s ") >= 20
    found = measures(sparcel("evaluate", model, svmlight))
    assert found["rows"] == 300
    assert found["accuracy"] > 0.95
    assert ("log_loss" in found) == (loss == "logistic")
    assert found["roc_auc"] > 0.98
    labels = [line.split()[0] for line in svmlight.read_text().splitlines()]
    predicted = sparcel("predict", model, svmlight).split()
    right = np.mean([float(a) == float(b) for a, b in zip(predicted, labels, strict=True)])
    assert right == pytest.approx(found["accuracy"])


def test_text_with_names_for_labels(tmp_path, tsv):
    model, plain, out = tmp_path / "model.npz", tmp_path / "new.txt", tmp_path / "labels"
    sparcel("fit", tsv, "--epochs", 10, "--ngrams", "word:1", "--dimensions", 500, "--out", model)
    assert measures(sparcel("evaluate", model, tsv))["accuracy"] == 1
    plain.write_text("cheap\na cup\nlunch\n")
    sparcel("predict", model, plain, "--probabilities", "--out", out)
    header, *rows = [line.split("\t") for line in out.read_text().splitlines()]
    assert header == ["label", "ham", "spam", "tea"]
    assert [header[1 + np.argmax([float(share) for share in row[1:]])] for row in rows] == [
        row[0] for row in rows
    ]
    assert [row[0] for row in rows] == ["spam", "tea", "ham"]
    assert [sum(map(float, row[1:])) for row in rows] == pytest.approx([1, 1, 1], abs=1e-4)


@pytest.mark.parametrize(
    "options", [("--batch-size", 40, "--step", "inverse"), ("--solver", "scd", "--block", 3)]
)
def test_a_training_goes_on_where_it_was_and_plots_its_loss(tmp_path, svmlight, options):
    checkpoint, cache, picture = tmp_path / "state.npz", tmp_path / "cache", tmp_path / "loss.png"
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    base = ("fit", svmlight, *options, "--cache", cache)
    sparcel(*base, "--epochs", 4, "--out", one, "--plot", picture)
    sparcel(*base, "--epochs", 2, "--out", two, "--checkpoint", checkpoint)
    told = sparcel(*base, "--epochs", 4, "--out", two, "--checkpoint", checkpoint, "--resume")
    assert "Going on after epoch 2" in told
    assert one.read_bytes() == two.read_bytes()
    assert picture.stat().st_size > 1000
    for other in (("--l2", 0.5), ("--seed", 1)):
        with pytest.raises(InputError, match="is of a training with other settings"):
            sparcel(*base, *other, "--checkpoint", checkpoint, "--resume")


def test_both_solvers_fit_several_classes_and_numbers(tmp_path, svmlight, tsv):
    model = tmp_path / "model.npz"
    settings = ("--solver", "scd", "--epochs", 20, "--l2", 1e-3, "--out", model)
    sparcel("fit", tsv, *settings, "--ngrams", "word:1", "--dimensions", 500)
    assert measures(sparcel("evaluate", model, tsv))["accuracy"] == 1
    for solver in (("--solver", "scd"), ("--batch-size", 50)):
        sparcel("fit", svmlight, *solver, "--epochs", 30, "--loss", "squared", "--out", model)
        assert measures(sparcel("evaluate", model, svmlight))["r2"] > 0.5


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("1 1:1\n-1 2:x\n", (), r"train.svm:2: .*x"),
        ("1 0:1\n-1 2:1\n", (), r"train.svm:1: .*index_from=0"),
        ("1 1:nan\n-1 2:1\n", (), r"train.svm:1: "),
        ("1 1:1\nnan 2:1\n", (), r"train.svm:2: the label 'nan' is no finite number"),
        ("inf 1:1\n1 2:1\n", (), r"train.svm:1: the label 'inf' is no finite number"),
        (
            "1e39 1:1\n1 2:1\n",
            ("--loss", "squared"),
            r"labels that are finite in float32, got 1e\+39",
        ),
        (
            "label\ttext\nnan\ta\n",
            ("--loss", "squared", "--layout", "tsv"),
            "finite in float32, got nan",
        ),
        ("1 1:1\n-1 9:1\n", ("--dimensions", 5), r"train.svm:2: "),
        ("", (), "there are no rows"),
        ("1 1:1\n1 2:1\n", (), "at least two classes"),
        ("a 1:1\nb 2:1\n", ("--loss", "squared"), "labels that are numbers"),
        ("1 1:1\n-1 2:1\n", ("--loss", "hings"), "did you mean 'hinge'"),
        ("1 1:1\n-1 2:1\n", ("--step", "adagrat"), "did you mean 'adagrad'"),
        ("1 1:1\n-1 2:1\n", ("--algorithm", "rings"), "did you mean 'ring'"),
        ("1 1:1\n-1 2:1\n", ("--density", 0.1), "density=0.1 goes with algorithm='allgather' or"),
        ("1 1:1\n-1 2:1\n", ("--bits", 3), "bits must be 8, 4 or None for all, got 3"),
        ("1 1:1\n-1 2:1\n", ("--resume",), "--resume needs --checkpoint"),
        ("1 1:1\n-1 2:1\n", ("--solver", "scdd"), "did you mean 'scd'"),
        ("1 1:1\n-1 2:1\n", ("--ngrams", "word:1"), "--ngrams is for files of text, such as .tsv"),
        ("a b\n", ("--layout", "tsv", "--index-from", 0), "--index-from is for files of svmlight"),
        ("1 1:1\n-1 2:1\n", ("--solver", "scd", "--loss", "hinge"), "take 'squared_hinge'"),
        (
            "1 1:1\n-1 2:1\n",
            ("--solver", "scd", "--batch-size", 10),
            "--batch-size is a setting of --solver sgd, and the solver is scd",
        ),
        ("1 1:1\n-1 2:1\n", ("--block", 10), "--block is a setting of --solver scd"),
        ("1 1:1\n-1 2:1\n", ("--layout", "lines"), "no label to fit to"),
        ("1 1:1\n-1 2:1\n", ("--layout", "jsonl"), "train.svm:1: not JSON"),
        ("1 1:1\n-1 2:1\n", ("--layout", "tsv", "--ngrams", "words:2"), "--ngrams must be word"),
    ],
)
def test_wrong_input_is_answered_in_words(tmp_path, content, options, message):
    file, model = tmp_path / "train.svm", tmp_path / "model.npz"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        sparcel("fit", file, "--out", model, *options)
    assert not model.exists()


def test_models_and_data_that_do_not_fit_are_refused(tmp_path, svmlight, tsv):
    model, other = tmp_path / "model.npz", tmp_path / "more.svm"
    sparcel("fit", svmlight, "--out", model)
    other.write_text("1 99:1\n")
    with pytest.raises(InputError, match="have 99 dimensions, the model 40"):
        sparcel("evaluate", model, other)
    other.write_text("2 1:1\n")
    with pytest.raises(InputError, match=r"label .*2.* is none of the classes"):
        sparcel("evaluate", model, other)
    with pytest.raises(InputError, match="fitted to svmlight files, and these files are tsv"):
        sparcel("predict", model, tsv)
    for broken in (b"", b"PK\x03\x04 and so on", model.read_bytes()[:-100]):
        other.write_bytes(broken)
        with pytest.raises(InputError, match="is no model of sparcel linear"):
            sparcel("predict", other, svmlight)
    with pytest.raises(InputError, match="there is no file"):
        sparcel("predict", tmp_path / "nowhere", svmlight)
    labels = tmp_path / "labels"
    labels.write_text("those of before")
    other.write_text("1 1:1\n1 1:x\n")
    with pytest.raises(InputError, match=r"more\.svm:2: "):
        sparcel("predict", model, other, "--out", labels)
    assert labels.read_text() == "those of before"


def test_an_output_never_takes_the_place_of_another_file_of_the_run(tmp_path, svmlight):
    model, before = tmp_path / "model.npz", svmlight.read_bytes()
    for options in (
        ("--out", svmlight),
        ("--out", model, "--checkpoint", svmlight),
        ("--out", model, "--plot", tmp_path / "." / "model.npz"),
    ):
        with pytest.raises(InputError, match=r"is (read from|given to --out) too; give another"):
            sparcel("fit", svmlight, *options)
    with pytest.raises(InputError, match=r"must end in \.pdf, \.png or \.svg"):
        sparcel("fit", svmlight, "--out", model, "--plot", tmp_path / "plot.xyz")
    sparcel("fit", svmlight, "--out", model)
    with pytest.raises(InputError, match="is read from too"):
        sparcel("predict", model, svmlight, "--out", model)
    assert svmlight.read_bytes() == before


def test_labels_are_the_same_whether_files_hold_numbers_or_texts(tmp_path):
    numbers, texts, model = (tmp_path / name for name in ("train.jsonl", "test.tsv", "model.npz"))
    rows = [(2 + i % 2 * 8, f"word{i % 2} more") for i in range(40)]
    numbers.write_text("".join(json.dumps({"label": y, "text": x}) + "\n" for y, x in rows))
    texts.write_text("label\ttext\n" + "".join(f"{y}\t{x}\n" for y, x in rows))
    sparcel("fit", numbers, "--out", model, "--epochs", 20)
    assert measures(sparcel("evaluate", model, texts))["accuracy"] == 1
    texts.write_text("label\ttext\nten\tword1\n")
    with pytest.raises(InputError, match=r"the model's labels are numbers, .*'ten'"):
        sparcel("evaluate", model, texts)


def test_more_dimensions_than_memory_holds(tmp_path, tsv):
    model, state, plain = tmp_path / "model.npz", tmp_path / "state.npz", tmp_path / "new.txt"
    base = ("fit", tsv, "--dimensions", 2**40, "--out", model, "--checkpoint", state)
    sparcel(*base, "--epochs", 5)
    told = sparcel(*base, "--epochs", 10, "--resume")
    assert "Going on after epoch 5" in told
    assert measures(sparcel("evaluate", model, tsv))["accuracy"] == 1
    assert model.stat().st_size < 10_000
    plain.write_text("cheap\na cup\nnever seen\n")
    assert sparcel("predict", model, plain).split()[:2] == ["spam", "tea"]


def test_a_checkpoint_of_other_rows_is_refused(tmp_path, svmlight):
    base = ("fit", svmlight, "--checkpoint", tmp_path / "state.npz", "--out", tmp_path / "m.npz")
    sparcel(*base, "--epochs", 1)
    svmlight.write_text(svmlight.read_text().replace(":1", ":2", 1))
    with pytest.raises(InputError, match="is of a training with other settings, data"):
        sparcel(*base, "--resume")


def test_labels_are_texts_on_all_ranks_if_they_are_on_one(tmp_path):
    file = tmp_path / "rows.svm"
    file.write_text("1 1:1\n" * 100 + "spam 2:1\n" * 50)

    def run(comm):
        rows = read(SvmLight(), file, comm)
        return sorted(set(rows.labels.tolist())), rows.dimensions

    assert simulate(2, run).results == [(["1"], 2), (["1", "spam"], 2)]
    file.write_text("1 1:1\n" * 100 + "spam 2:1\n" * 50 + "1 2:x\n")
    with pytest.raises(InputError, match=r"rows.svm:151: .*x"):
        simulate(2, run)


def started(ranks: int, arguments: list[str]) -> list[subprocess.Popen[str]]:
    """Start the command as torchrun would."""
    # Linux gives connections ports from 32768 on, and other tests connect meanwhile.
    with socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000))) as free:
        port = str(free.getsockname()[1])
    common = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    command = [sys.executable, "-m", "sparcel", "linear", *arguments]
    return [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_rank_is_one_error_and_the_training_goes_on_to_the_same_model(tmp_path, svmlight):
    checkpoint, one, two = (tmp_path / name for name in ("state.npz", "one.npz", "two.npz"))
    base = ["fit", str(svmlight), "--batch-size", "20", "--epochs", "60", "--checkpoint"]
    for process in started(3, [*base, str(tmp_path / "own.npz"), "--out", str(one)]):
        assert process.wait(120) == 0, process.communicate()
    processes = started(3, [*base, str(checkpoint), "--out", str(two)])
    while not checkpoint.exists() and processes[0].poll() is None:
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGKILL)
    for rank in (0, 2):
        _, told = processes[rank].communicate(timeout=120)
        assert processes[rank].returncode == 1
        assert told.count("\n") == 1, told
        assert "rank 1" in told
    processes[1].communicate()
    assert not two.exists()
    told = [
        process.communicate(timeout=120)[0]
        for process in started(3, [*base, str(checkpoint), "--out", str(two), "--resume"])
    ]
    assert "Going on after epoch" in told[0]
    assert not told[1]
    assert one.read_bytes() == two.read_bytes()


def test_a_model_keeps_what_it_is(tmp_path):
    for dense in (False, True):
        coefficients = np.zeros((100, 2), np.float32)
        coefficients[: 100 if dense else 3] = 1.5
        coordinates = Coordinates(None, coefficients, np.ones(2), 100)
        LinearModel(coordinates, "hinge", np.array(["a", "b"]), {"x": [1]}).save(
            tmp_path / "model.npz"
        )
        found = LinearModel.load(tmp_path / "model.npz")
        assert (found.coordinates.dense() == coefficients).all()
        assert list(found.classes) == ["a", "b"]
        assert json.dumps(found.about) == '{"x": [1]}'
