"""Train logistic regression to its optimum, by scikit-learn and by both solvers of sparcel.

    python -m benchmarks.linear.optimum WORK --output benchmarks/results/linear_optimum.json
    sparcel lab run --nodes 8 --rate 1gbit -- python -m benchmarks.linear.optimum WORK \\
        --output benchmarks/results/linear_optimum.json

``WORK`` is the folder that `models.py` made of the URLs. What is minimised is the mean loss
+ 1e-6 / 2 · |w|², without an intercept, which liblinear would regularise. liblinear minimises
C · (the sum of the losses) + 1 / 2 · |w|², the same for C = 1 / (1e-6 · rows). One process runs
first: it lets liblinear find the optimum. Every arm of sparcel, alone or on many ranks, trains
until its objective is within ``--gap`` of that, or until its epochs are over. Objectives are
computed by one function, in float64; the time that takes is not counted, nor is the arranging of
the rows, which ``before_s`` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.linear_model import LogisticRegression

from benchmarks.clock import took
from benchmarks.linear.data import SETS, examples, place_of, rows_of
from benchmarks.linear.data import matrix as matrix_of
from benchmarks.record import NEEDED, Row, options, run_here
from benchmarks.record import rows_of as recorded
from sparcel.core.comm import Communicator, world
from sparcel.products.linear.coordinate_descent import Scd
from sparcel.products.linear.gradient_descent import prepare
from sparcel.products.linear.ranks import gathered
from sparcel.products.linear.trainer import Settings
from sparcel.products.rows import Rows, shard

L2, LIBLINEAR = 1e-6, "liblinear"

ETA0 = 0.5
"""AdaGrad's first step, chosen among 0.2 to 2 for this objective; coordinate descent has no such
setting."""


@dataclass(frozen=True)
class Arm:
    """One way to train, and the most epochs."""

    label: str
    epochs: int
    settings: dict[str, Any]


def arms(ranks: int) -> list[Arm]:
    """Return what is compared; a step takes as many rows or coordinates of all ranks together."""
    scd, sgd = {"solver": "scd", "block": 8000 // ranks}, {"batch_size": 8000 // ranks}
    found = [
        Arm("scd", 150, scd),
        Arm("sgd, adagrad", 200, {**sgd, "step": "adagrad", "eta0": ETA0}),
    ]
    if ranks == 1:
        return [*found, Arm("sgd, constant", 50, {**sgd, "step": "constant", "eta0": 10.0})]
    return [
        Arm(f"{arm.label}{', asynchronous' * late}", arm.epochs, {**arm.settings, **more})
        for arm in found
        for late, more in ((False, {}), (True, {"asynchronous": True}))
    ]


def objective(
    coordinates: np.ndarray, matrix: sp.csr_matrix, targets: np.ndarray, comm: Communicator | None
) -> float:
    """Return what is minimised, over the rows of all ranks; all ranks call."""
    losses = np.logaddexp(0, -(matrix @ coordinates) * targets)
    total, count = np.sum(gathered(comm, [float(losses.sum()), len(losses)], "losses"), axis=0)
    return float(total / count + L2 / 2 * (coordinates**2).sum())


def liblinear(rows: Rows, tolerance: float) -> Row:
    """Return the optimum as scikit-learn finds it."""
    matrix, targets = matrix_of(rows).astype(np.float64), examples(rows).targets
    model = LogisticRegression(
        C=1 / (L2 * len(rows)),
        solver="liblinear",
        fit_intercept=False,
        tol=tolerance,
        max_iter=1000,
    )
    seconds, busy, _ = took(model.fit, matrix, targets)
    found = objective(model.coef_[0], matrix, targets, None)
    return {"tolerance": tolerance, "seconds": seconds, "cpu_seconds": busy, "objective": found}


def trained(arm: Arm, rows: Rows, target: float, comm: Communicator | None) -> Row:
    """Train until the objective is at most ``target``; all ranks call, and return the worst."""
    settings = Settings(**{"l2": L2, "tol": None, "fit_intercept": False, **arm.settings})
    own = examples(rows)
    make = Scd if settings.solver == "scd" else prepare
    before, _, trainer = took(make, own, settings, comm)
    matrix = matrix_of(rows).astype(np.float64)
    epochs: list[tuple[float, float, float, float]] = []
    objectives: list[float] = []
    while len(epochs) < arm.epochs and not (objectives and objectives[-1] <= target):
        _, busy, one = took(trainer.epoch)
        epochs.append((one.seconds, one.communication_seconds, busy, one.volume))
        coordinates = trainer.read()[0][:, 0].astype(np.float64)
        objectives.append(objective(coordinates, matrix, own.targets, comm))
    worst = np.max(gathered(comm, np.sum(epochs, axis=0).tolist(), "times"), axis=0).tolist()
    names = ("seconds", "communication_seconds", "cpu_seconds", "bytes")
    return {
        **dict(zip(names, worst, strict=True)),
        "before_s": before,
        "epochs": len(epochs),
        "reached": objectives[-1] <= target,
        "objective": objectives[-1],
        "objectives": objectives,
    }


def main() -> None:
    """Run what is not recorded yet: liblinear and sparcel alone, or sparcel on many ranks."""
    arguments = options(__doc__, "work", gap=1e-4, tolerance=1e-4, output=NEEDED)
    torch.set_num_threads(1)
    comm, whole = world(), rows_of(SETS["urls"], arguments.work, "train-compact")
    rank, ranks = place_of(comm)
    own, by_label = shard(whole, rank, ranks), {arm.label: arm for arm in arms(ranks)}

    @cache
    def target() -> float:
        (known,) = (row for row in recorded(arguments.output) if row["arm"] == LIBLINEAR)
        return float(known["objective"]) + arguments.gap

    def run(arm: str, nodes: int) -> Row:
        if arm == LIBLINEAR:
            return liblinear(whole, arguments.tolerance)
        return trained(by_label[arm], own, target(), comm)

    if ranks > 1:
        target()  # before rank 0 writes

    labels = [*([LIBLINEAR] if ranks == 1 else ()), *by_label]
    jobs = [{"nodes": ranks, "arm": label} for label in labels]
    run_here(arguments.output, run, jobs, rank, lambda: gathered(comm, None, "start"))


if __name__ == "__main__":
    main()
