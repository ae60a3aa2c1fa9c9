"""Time epochs of linear models on an emulated network, with dense and with sparse exchanges.

    python -m benchmarks.linear.models DATA --output benchmarks/results/linear_models.json

``DATA`` holds the folders ``urls``, ``20newsgroups`` and ``imdb-subset``. Files and caches go to
``--work``. For each set and number of nodes the lab is started once, and each of its ranks trains
with one arm after the other. Arms that the output has are not repeated; it has some more.

An epoch's ``seconds`` are wall clock, of which a rank waits ``communication_seconds`` for others;
``cpu_seconds`` is the processor time of its whole process. Each is the most of any rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.clock import took
from benchmarks.linear.data import SETS, WORK, examples, make, place_of, rows_of
from benchmarks.record import NEEDED, Row, among, in_lab, options, run_here
from sparcel.core.comm import world
from sparcel.products.linear.gradient_descent import prepare
from sparcel.products.linear.model import LinearModel
from sparcel.products.linear.ranks import gathered
from sparcel.products.linear.trainer import Settings
from sparcel.products.rows import shard

COMPACT = "dense over columns that occur"
ARMS: dict[str, dict[str, Any]] = {
    "dense": {"algorithm": "dense"},
    COMPACT: {"algorithm": "dense"},
    **{
        name: {"algorithm": name}
        for name in (
            *("sharded", "auto", "split_allgather", "recursive_doubling", "halving_doubling"),
            *("allgather", "ring"),
        )
    },
    "split_allgather, top 0.1 %": {"algorithm": "split_allgather", "density": 0.001},
    "sharded, 8 bits": {"algorithm": "sharded", "bits": 8},
}
"""Ways to train, by the settings that differ."""


def measure(told: argparse.Namespace, arm: str, **job: Any) -> Row:
    """Train with one arm and return its row; all ranks call."""
    one, comm = SETS[told.set], world()
    rank, ranks = place_of(comm)
    whole = rows_of(one, told.work, "train-compact" if arm == COMPACT else "train")
    classes = np.unique(whole.labels)
    settings = Settings(loss=job["loss"], l2=0.0, eta0=told.step, **ARMS[arm])
    sgd = prepare(examples(shard(whole, rank, ranks), classes[1]), settings, comm)
    epochs = []
    for _ in range(one.epochs):
        _, busy, epoch = took(sgd.epoch)
        own = [epoch.seconds, epoch.communication_seconds, busy, epoch.volume]
        worst = np.max(gathered(comm, own, "times"), axis=0).tolist()
        epochs.append([*worst, epoch.loss])
    names = "seconds", "communication_seconds", "cpu_seconds", "bytes", "train_losses"
    row: Row = {"steps": sgd.steps, **dict(zip(names, np.array(epochs).T.tolist(), strict=True))}
    row["accuracy"] = {}
    if arm != COMPACT:
        fitted = LinearModel(sgd.fitted()[0], job["loss"], classes)
        for part in told.tests if rank == 0 else ():
            test = rows_of(one, told.work, part)
            found = fitted.predict(fitted.margins(test)) == test.labels
            row["accuracy"][part] = float(found.mean())
    return row


def main() -> None:
    """Start the lab for each set and number of nodes, or be one of its ranks."""
    told = options(
        __doc__,
        "data",
        work=WORK,
        nodes=[1, 2, 4, 8],
        sets=among(SETS),
        arms=among(ARMS),
        rate="1gbit",
        step=0.5,
        output=NEEDED,
        set=str,  # these two tell a rank of the lab what to do
        tests={"nargs": "*"},
    )
    if told.set:
        torch.set_num_threads(1)
        comm = world()
        rank, ranks = place_of(comm)
        network = os.environ.get("SPARCEL_LAB_RATE_BITS_PER_S", "")
        about = {"set": told.set, "nodes": ranks, "network": network, "loss": "logistic"}
        jobs = [{**about, "arm": arm} for arm in told.arms]
        work = partial(measure, told)
        run_here(told.output, work, jobs, rank, lambda: gathered(comm, None, "start"))
        return
    told.work.mkdir(parents=True, exist_ok=True)
    for name in told.sets:
        tests = make(told.data, told.work, name)
        for nodes in told.nodes:
            in_lab(nodes, told.rate, *sys.argv[1:], "--set", name, "--tests", *tests)


if __name__ == "__main__":
    main()
