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

import argparse
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import SGDClassifier

from benchmarks.linear.data import SETS, make, rows_of
from benchmarks.linear.single import EPOCHS, matrix
from benchmarks.machine import machine
from benchmarks.record import Row, write
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("build/linear"), help="for caches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    make(arguments.data, arguments.work, "urls")
    train, test = (rows_of(SETS["urls"], arguments.work, part) for part in ("train", "test"))
    features, held_out = (matrix(rows).copy() for rows in (train, test))
    labels, truth = (rows.labels == "1" for rows in (train, test))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)
    rows: list[Row] = []
    origin = machine()
    origin["command"] = origin["command"].replace(str(arguments.data), "DATA")
    for turn in range(arguments.rounds):
        for name, model in CONTENDERS.items():
            start, cpu = time.perf_counter(), time.process_time()
            model.fit(features, labels)
            row = {
                "contender": name,
                "round": turn,
                "epochs": EPOCHS,
                "entries": train.nnz,
                "seconds": time.perf_counter() - start,
                "cpu_seconds": time.process_time() - cpu,
                "load": os.getloadavg()[0],
                "accuracy": float(np.mean(model.predict(held_out) == truth)),
            }
            rows.append(row)
            print(row, flush=True)
            write(arguments.output, origin, rows)


if __name__ == "__main__":
    main()
