"""Time `fit` from a matrix in memory, all of it, beside scikit-learn's ``SGDClassifier``.

    python -m benchmarks.linear.fit DATA --output benchmarks/results/linear_fit.json

``DATA`` holds the folder ``urls``; rows are n-grams of 3 and 4 characters in 3,231,961 dimensions,
a CSR matrix of float32 that both get. Unlike `single.py`, which times epochs, this times the
call: checks, conversions, the arranging of rows in batches, five epochs, and the model at the end.
Contenders take turns, ``--rounds`` times, each on one thread. Where other processes take the
machine's cores, seconds of the processor tell more than those of the clock; a row has both, and how
many processes wanted to run.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import SGDClassifier

from benchmarks.linear.data import WORK, matrix, timed, urls
from benchmarks.linear.single import EPOCHS
from benchmarks.record import NEEDED, Row, machine, options, write
from sparcel.products.linear import SparseLogisticRegression

L2 = 1e-6

CONTENDERS: dict[str, Any] = {
    "scikit-learn": SGDClassifier(loss="log_loss", alpha=L2, max_iter=EPOCHS, tol=None),
    **{
        f"sparcel, batch {size}": SparseLogisticRegression(
            l2=L2, epochs=EPOCHS, tol=None, batch_size=size
        )
        for size in (1000, 8000)
    },
}


def main() -> None:
    """Fit all contenders in turns, and record each fit."""
    arguments = options(__doc__, "data", work=WORK, rounds=5, output=NEEDED)
    train, test = urls(arguments.data, arguments.work)
    features, held_out = (matrix(rows).copy() for rows in (train, test))
    labels, truth = (rows.labels == "1" for rows in (train, test))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)
    rows: list[Row] = []
    origin = machine(DATA=arguments.data)
    for turn in range(arguments.rounds):
        for name, model in CONTENDERS.items():
            took = timed(partial(model.fit, features, labels))
            row = {
                "contender": name,
                "round": turn,
                "epochs": EPOCHS,
                "entries": train.nnz,
                **took,
                "accuracy": float(np.mean(model.predict(held_out) == truth)),
            }
            rows.append(row)
            print(row, flush=True)
            write(arguments.output, origin, rows)


if __name__ == "__main__":
    main()
