"""Time linear models in one process, beside scikit-learn and Vowpal Wabbit.

    python -m benchmarks.linear.single DATA --what epochs \
        --output benchmarks/results/linear_single.json
    python -m benchmarks.linear.single DATA --what fits --rounds 5 \
        --output benchmarks/results/linear_fit.json
    python -m benchmarks.linear.single DATA --what reading --rounds 7 \
        --output benchmarks/results/linear_reading.json

``DATA`` holds the folder ``urls``; rows are n-grams of 3 and 4 characters in 3,231,961 dimensions.
Contenders take turns, ``--rounds`` times. Where other processes take the machine's cores, seconds
of the processor tell more than those of the clock; rows have both, and how many processes wanted to
run.

**Epochs** are of logistic regression. Vowpal Wabbit joins if its Python package is there; it reads
the same rows from its own cache, as it does on its own. **Fits** are `fit` from a matrix in memory,
all of it: checks, conversions, the arranging of rows in batches, five epochs, and the model at the
end; both get a CSR matrix of float32, and one thread. **Reading** is of files of the first 100,000
URLs, as text and as n-grams in SVMlight's format, which are in the system's page cache; on one
thread, beside scikit-learn's reading of the same SVMlight file. The record of epochs has more arms.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_svmlight_file
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import SGDClassifier

from benchmarks.clock import took
from benchmarks.linear.data import SETS, WORK, examples, matrix, texts, timed, urls
from benchmarks.record import NEEDED, Row, machine, options, tell, write
from sparcel.products.linear import SparseLogisticRegression
from sparcel.products.linear.gradient_descent import Sgd, prepare
from sparcel.products.linear.trainer import Settings
from sparcel.products.rows import Rows, SvmLight, Text, cached, make_cache, map_rows, read_svmlight

EPOCHS, READ = 5, 100_000

Found = dict[str, Row]
Contenders = dict[str, Callable[[], Found]]
"""By name, what returns rows by their labels."""


def sparcel(train: Rows, test: Rows, settings: Settings) -> Found:
    """Return, by threads, the seconds of each epoch, of arranging the rows, and the accuracy.

    One thread and two take their epochs in turns, so that what disturbs one disturbs the other.
    """
    found: Found = {}
    trainers: dict[int, Sgd] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds, _, trainers[threads] = took(prepare, examples(train), settings)
        label = f"sparcel, batch {settings.batch_size}, l2 {settings.l2:g}, {threads} threads"
        found[label] = {"seconds": [], "before_s": seconds, "accuracy": []}
    for _ in range(EPOCHS):
        for (threads, sgd), row in zip(trainers.items(), found.values(), strict=True):
            torch.set_num_threads(threads)
            row["seconds"].append(sgd.epoch().seconds)
            weights, intercept = sgd.read()
            right = (matrix(test) @ weights[:, 0] + intercept[0] > 0) == (test.labels == "1")
            row["accuracy"].append(float(right.mean()))
    return found


def scikit_learn(train: Rows, test: Rows) -> Found:
    """Return the same of ``SGDClassifier.partial_fit``, whose rows need nothing before."""
    model = SGDClassifier(loss="log_loss", alpha=1e-6, random_state=0)
    features, labels = matrix(train).astype(np.float64), (train.labels == "1").astype(int)
    seconds, accuracies = [], []
    for _ in range(EPOCHS):
        seconds.append(took(partial(model.partial_fit, features, labels, classes=[0, 1])).seconds)
        accuracies.append(float(model.score(matrix(test), (test.labels == "1").astype(int))))
    return {"scikit-learn": {"seconds": seconds, "before_s": 0.0, "accuracy": accuracies}}


def vowpal_wabbit(train: Rows, test: Rows, work: Path) -> Found:
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
    row = {"seconds": [epoch], "before_s": taken[0], "accuracy": [accuracy]}
    return {"Vowpal Wabbit": row}


def of_epochs(train: Rows, test: Rows, work: Path) -> Contenders:
    contenders: Contenders = {
        "scikit-learn": partial(scikit_learn, train, test),
        "Vowpal Wabbit": partial(vowpal_wabbit, train, test, work),
    }
    for size in (1000, 16_000):
        settings = Settings(l2=0.0, batch_size=size, tol=None)
        contenders[f"sparcel, {size}"] = partial(sparcel, train, test, settings)
    return contenders


def of_fits(train: Rows, test: Rows) -> Contenders:
    features, held_out = (matrix(rows).copy() for rows in (train, test))
    labels, truth = (rows.labels == "1" for rows in (train, test))
    models = {
        "scikit-learn": SGDClassifier(loss="log_loss", alpha=1e-6, max_iter=EPOCHS, tol=None),
        **{
            f"sparcel, batch {size}": SparseLogisticRegression(
                l2=1e-6, epochs=EPOCHS, batch_size=size, tol=None
            )
            for size in (1000, 8000)
        },
    }

    def fitted(name: str) -> Found:
        row = {"epochs": EPOCHS, **timed(partial(models[name].fit, features, labels))}
        right = models[name].predict(held_out) == truth
        return {name: row | {"accuracy": float(np.mean(right))}}

    return {name: partial(fitted, name) for name in models}


def of_reading(part: Rows, lines: Iterable[str], folder: Path) -> Contenders:
    svmlight, text = folder / "rows.svm", folder / "rows.tsv"
    svmlight.write_text("".join(f"{label} {row}\n" for label, row in texts(part, 1)))
    text.write_text("".join(lines))
    size = part.dimensions
    cache, source = folder / "rows.cache", SvmLight(size)
    make_cache(cache, svmlight, source)
    hashed = Text("tsv", SETS["urls"].ngrams)

    def written() -> None:
        (folder / "new.cache").unlink(missing_ok=True)
        make_cache(folder / "new.cache", svmlight, source)

    calls: dict[str, tuple[Path, Callable[[], object]]] = {
        "SVMlight, scikit-learn": (
            svmlight,
            lambda: load_svmlight_file(str(svmlight), n_features=size),
        ),
        "SVMlight, into memory": (svmlight, lambda: read_svmlight(svmlight, size)),
        "SVMlight, into a mapped file": (svmlight, lambda: map_rows(svmlight, source)),
        "SVMlight, into a cache": (svmlight, written),
        "text, into a mapped file": (text, lambda: map_rows(text, hashed)),
        "a cache, mapped and its checksums compared": (
            cache,
            lambda: cached(cache, svmlight, source),
        ),
    }

    def read(name: str) -> Found:
        file, call = calls[name]
        return {name: timed(call) | {"bytes": file.stat().st_size}}

    return {name: partial(read, name) for name in calls}


def main() -> None:
    """Let all contenders take turns, and record each turn."""
    told = options(
        __doc__,
        "data",
        what={"choices": ("epochs", "fits", "reading"), "required": True},
        work=WORK,
        rounds=3,
        output=NEEDED,
    )
    train, test = urls(told.data, told.work)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)
    rows, origin = list[Row](), machine()
    with tempfile.TemporaryDirectory(dir=told.work) as folder:
        if told.what == "epochs":
            contenders = of_epochs(train, test, told.work)
        elif told.what == "fits":
            contenders = of_fits(train, test)
        else:
            train = train.slice(0, min(READ, len(train)))
            text = SETS["urls"].file(told.work, "train").read_text().splitlines(keepends=True)
            contenders = of_reading(train, text[: READ + 1], Path(folder))
        for turn in range(told.rounds):
            for name, run in contenders.items():
                try:
                    found = run()
                except ModuleNotFoundError as missing:
                    print(f"{name} is left out: {missing}")
                    continue
                for label, row in found.items():
                    about = {"contender": label, "round": turn, "entries": train.nnz}
                    rows.append(about | row)
                    tell(rows[-1])
                write(told.output, origin, rows)


if __name__ == "__main__":
    main()
