"""Time epochs of linear models on an emulated network, with dense and with sparse exchanges.

    python -m benchmarks.linear.models DATA --output benchmarks/results/linear_models.json

``DATA`` holds the folders ``urls``, ``20newsgroups`` and ``imdb-subset``. Files and caches go to
``--work``. For each set and number of nodes the lab is started once, and each of its ranks trains
with one arm after the other. Arms that the output has are not repeated.

An epoch's ``seconds`` are wall clock, of which a rank waits ``communication_seconds`` for others;
``cpu_seconds`` is the processor time of its whole process. Each is the most of any rank.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.linear.data import SETS, WORK, examples, make, place_of, rows_of
from benchmarks.record import NEEDED, Row, add, among, itself, machine, options, show
from benchmarks.record import rows_of as recorded
from sparcel.core.comm import world
from sparcel.core.stream import SparseStream
from sparcel.products.linear.gradient_descent import prepare
from sparcel.products.linear.model import LinearModel
from sparcel.products.linear.ranks import gathered
from sparcel.products.linear.replicated import Exchange, Replicated
from sparcel.products.linear.trainer import Settings
from sparcel.products.rows import shard


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    label: str
    algorithm: str
    loss: str = "logistic"
    asynchronous: bool = False
    compact: bool = False
    half: bool = False
    format: str = "packed"
    density: float | None = None
    bits: int | None = None


LOSSES = ("logistic", "hinge")
SPARSE = (
    "sharded",
    "auto",
    "split_allgather",
    "recursive_doubling",
    "halving_doubling",
    "allgather",
    "ring",
)
ARMS = [
    *(Arm("dense", "dense", loss) for loss in LOSSES),
    Arm("dense bf16", "dense", half=True),
    Arm("dense over columns that occur", "dense", compact=True),
    *(
        Arm(name, name, loss)
        for loss in LOSSES
        for name in SPARSE[: 7 if loss == "logistic" else 2]
    ),
    *(Arm(f"{name}, raw", name, format="raw") for name in SPARSE[1:3]),
    Arm("dense, asynchronous", "dense", asynchronous=True),
    *(Arm(f"{name}, asynchronous", name, asynchronous=True) for name in SPARSE[:2]),
    Arm("split_allgather, top 0.1 %", "split_allgather", density=0.001),
    Arm("split_allgather, top 0.1 %, 8 bits", "split_allgather", density=0.001, bits=8),
    *(
        Arm(f"{name}, {bits} bits", name, bits=bits)
        for name in ("split_allgather", "sharded")
        for bits in (8, 4)
    ),
]


class HalfPrecision(Replicated):
    """Sums dense gradients in bfloat16; the tail, which counts rows, in float32."""

    def _sum(self, stream: SparseStream) -> SparseStream:
        vector = stream.to_dense()
        half, tail = vector.bfloat16(), vector[-3:].clone()
        comm = self._comm
        assert comm is not None
        for part in (half, tail):
            comm.all_reduce(part)
        total = half.float()
        total[-3:] = tail
        return SparseStream.unchecked(None, total, len(total))


def measure(arm: Arm, name: str, work: Path, tests: list[str], step: float) -> Row:
    """Train with one arm and return its row; all ranks call."""
    one, comm = SETS[name], world()
    rank, ranks = place_of(comm)
    whole = rows_of(one, work, "train-compact" if arm.compact else "train")
    rows = shard(whole, rank, ranks)
    classes = np.unique(whole.labels)
    settings = Settings(
        loss=arm.loss,
        l2=0.0,
        eta0=step,
        algorithm=arm.algorithm,
        asynchronous=arm.asynchronous,
        format=arm.format,
        density=arm.density,
        bits=arm.bits,
    )
    sgd = prepare(examples(rows, classes[1]), settings, comm)
    if arm.half:
        model = sgd.model
        assert isinstance(model, Replicated)
        sgd.model = HalfPrecision(model.weights, sgd.batches, comm, Exchange("dense", "packed", 0))
    epochs = []
    for _ in range(one.epochs):
        cpu = time.process_time()
        epoch = sgd.epoch()
        own = [epoch.seconds, epoch.communication_seconds, time.process_time() - cpu, epoch.volume]
        worst = np.max(gathered(comm, own, "times"), axis=0).tolist()
        epochs.append([*worst, epoch.loss])
    seconds, waited, cpu_seconds, volume, loss = np.array(epochs).T.tolist()
    row = {
        "set": name,
        "nodes": ranks,
        "network": os.environ.get("SPARCEL_LAB_RATE_BITS_PER_S", ""),
        "arm": arm.label,
        "loss": arm.loss,
        "steps": sgd.steps,
        "seconds": seconds,
        "communication_seconds": waited,
        "cpu_seconds": cpu_seconds,
        "bytes": volume,
        "train_losses": loss,
        "accuracy": {},
    }
    if not arm.compact:
        fitted = LinearModel(sgd.fitted()[0], arm.loss, classes)
        for part in tests if rank == 0 else ():
            test = rows_of(one, work, part)
            found = fitted.predict(fitted.margins(test)) == test.labels
            row["accuracy"][part] = float(found.mean())
    return row


def worker(arguments: argparse.Namespace) -> None:
    """Run the arms that are not recorded yet, on every rank."""
    torch.set_num_threads(1)
    comm = world()
    rank, ranks = place_of(comm)
    rows, origin = recorded(arguments.output), machine()
    known = [(row["set"], row["nodes"], row["network"], row["arm"], row["loss"]) for row in rows]
    place = (
        arguments.set,
        ranks,
        os.environ.get("SPARCEL_LAB_RATE_BITS_PER_S", ""),
    )
    gathered(comm, None, "start")  # all have read what rank 0 will write
    for arm in ARMS:
        wanted = arguments.arms is None or arm.label in arguments.arms
        if not wanted or (*place, arm.label, arm.loss) in known:
            continue
        row = measure(arm, arguments.set, arguments.work, arguments.tests, arguments.step)
        if rank == 0:
            names = ("seconds", "communication_seconds", "cpu_seconds", "bytes", "train_losses")
            show([row | {name: float(np.median(row[name])) for name in names}])
            add(arguments.output, origin, rows, row)


def main() -> None:
    """Start the lab for each set and number of nodes, or be one of its ranks."""
    arguments = options(
        __doc__,
        "data",
        work=WORK,
        nodes=[1, 2, 4, 8],
        sets=among(SETS),
        arms={"nargs": "+"},
        rate="1gbit",
        step=0.5,
        output=NEEDED,
        set=str,  # these two tell a rank of the lab what to do
        tests={"nargs": "*"},
    )
    if arguments.set:
        worker(arguments)
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.sets:
        tests = make(arguments.data, arguments.work, name)
        for nodes in arguments.nodes:
            command = [sys.executable, *itself(), *sys.argv[1:], "--set", name, "--tests", *tests]
            lab = [sys.executable, "-m", "sparcel", "lab", "run", "--nodes", str(nodes)]
            subprocess.run([*lab, "--rate", arguments.rate, "--", *command], check=True)


if __name__ == "__main__":
    main()
