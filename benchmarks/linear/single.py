"""Time epochs of logistic regression in one process, beside scikit-learn and Vowpal Wabbit.

    python -m benchmarks.linear.single DATA --output benchmarks/results/linear_single.json

``DATA`` holds the folder ``urls``; rows are n-grams of 3 and 4 characters in 3,231,961 dimensions.
Each contender trains for as many epochs, in turns, ``--rounds`` times. Vowpal Wabbit joins if its
Python package is there; it reads the same rows from its own cache, as it does on its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import SGDClassifier

from benchmarks.linear.data import SETS, WORK, examples, matrix, texts, urls
from benchmarks.record import NEEDED, Row, machine, options, write
from sparcel.products.linear.gradient_descent import Sgd, prepare
from sparcel.products.linear.trainer import Settings
from sparcel.products.rows import HashedNGrams, Rows

EPOCHS = 5
BATCHES = (1000, 8000, 16_000)


def sparcel(train: Rows, test: Rows, settings: Settings) -> dict[str, Row]:
    """Return, by threads, the seconds of each epoch, of arranging the rows, and the accuracy.

    One thread and two take their epochs in turns, so that what disturbs one disturbs the other.
    """
    found: dict[str, Row] = {}
    trainers: dict[int, Sgd] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        start = time.perf_counter()
        trainers[threads] = prepare(examples(train), settings)
        label = f"sparcel, batch {settings.batch_size}, l2 {settings.l2:g}, {threads} threads"
        found[label] = {"seconds": [], "before_s": time.perf_counter() - start, "accuracy": []}
    for _ in range(EPOCHS):
        for (threads, sgd), row in zip(trainers.items(), found.values(), strict=True):
            torch.set_num_threads(threads)
            row["seconds"].append(sgd.epoch().seconds)
            weights, intercept = sgd.read()
            right = (matrix(test) @ weights[:, 0] + intercept[0] > 0) == (test.labels == "1")
            row["accuracy"].append(float(right.mean()))
    return found


def scikit_learn(train: Rows, test: Rows) -> Row:
    """Return the same of ``SGDClassifier.partial_fit``, whose rows need nothing before."""
    model = SGDClassifier(loss="log_loss", alpha=1e-6, random_state=0)
    features, labels = matrix(train).astype(np.float64), (train.labels == "1").astype(int)
    seconds, accuracies = [], []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        model.partial_fit(features, labels, classes=[0, 1])
        seconds.append(time.perf_counter() - start)
        accuracies.append(float(model.score(matrix(test), (test.labels == "1").astype(int))))
    return {"seconds": seconds, "before_s": 0.0, "accuracy": accuracies}


def vowpal_wabbit(train: Rows, test: Rows, work: Path) -> Row:
    """Return the mean epoch after the first, which makes the cache, and the accuracy at the end."""
    from vowpalwabbit import Workspace

    files = {"train": work / "urls.vw", "test": work / "urls-test.vw"}
    for file, rows in zip(files.values(), (train, test), strict=True):
        if not file.exists():
            with file.open("w") as out:
                for label, row in texts(rows, 0):
                    out.write(f"{1 if label == '1' else -1} | {row}\n")
    taken = []
    for passes in (1, EPOCHS):
        cache = work / "urls.vw.cache"
        cache.unlink(missing_ok=True)
        model = work / "urls.vw.model"
        start = time.perf_counter()
        Workspace(
            f"--data {files['train']} --cache_file {cache} --passes {passes} --holdout_off -b 22"
            f" --loss_function logistic --quiet -f {model}"
        ).finish()
        taken.append(time.perf_counter() - start)
    fitted = Workspace(f"-t -i {model} --quiet --link identity")
    with files["test"].open() as lines:
        margins = np.array([fitted.predict(line) for line in lines])
    fitted.finish()
    epoch = (taken[1] - taken[0]) / (EPOCHS - 1)
    accuracy = float(((margins > 0) == (test.labels == "1")).mean())
    return {"seconds": [epoch], "before_s": taken[0], "accuracy": [accuracy]}


def hashing(data: Path) -> Row:
    """Return the seconds of hashing the URLs, by scikit-learn and by sparcel on one thread."""
    from sklearn.feature_extraction.text import HashingVectorizer

    one = SETS["urls"]
    lines = one.file(data, "train").read_text().splitlines()[1:]
    texts = [line.split("\t")[1] for line in lines]
    size = one.ngrams.dimensions
    start = time.perf_counter()
    HashingVectorizer(analyzer="char", ngram_range=(3, 4), n_features=size).transform(texts)
    middle = time.perf_counter()
    HashedNGrams("char", (3, 4), size).rows(texts, threads=1)
    return {"seconds": [middle - start, time.perf_counter() - middle]}


def main() -> None:
    """Let all contenders train in turns, and record each round."""
    arguments = options(__doc__, "data", work=WORK, rounds=3, output=NEEDED)
    train, test = urls(arguments.data, arguments.work)
    contenders: dict[str, Callable[[], dict[str, Row]]] = {
        "scikit-learn": lambda: {"scikit-learn": scikit_learn(train, test)},
        "Vowpal Wabbit": lambda: {"Vowpal Wabbit": vowpal_wabbit(train, test, arguments.work)},
        "hashing": lambda: {"hashing: scikit-learn, sparcel": hashing(arguments.work)},
    }
    for size in BATCHES:
        for l2 in (0.0, 1e-7):
            settings = Settings(l2=l2, batch_size=size, tol=None)
            contenders[f"sparcel, {size}, {l2}"] = lambda s=settings: sparcel(train, test, s)
    rows: list[Row] = []
    for turn in range(arguments.rounds):
        for name, run in contenders.items():
            try:
                found = run()
            except ModuleNotFoundError as missing:
                print(f"{name} is left out: {missing}")
                continue
            for label, row in found.items():
                rows.append({"contender": label, "round": turn, "entries": train.nnz, **row})
                each = np.median(row["seconds"]) / train.nnz * 1e9
                print(f"{label}: {np.median(row['seconds']):.3f} s, {each:.2f} ns an entry, {row}")
            write(arguments.output, machine(), rows)


if __name__ == "__main__":
    main()
