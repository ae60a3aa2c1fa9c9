"""Fit the URLs with Spark's MLlib, on one emulated node and on several.

    python -m benchmarks.linear.spark WORK --output benchmarks/results/linear_spark.json

``WORK`` is the folder that `models.py` made of the URLs. Needs ``pyspark`` and a Java
runtime. Each node of the lab runs a worker of Spark's standalone cluster with one core; the first
one runs the master and the driver too.

Two of MLlib's solvers fit a logistic regression to rows that are cached in memory: its mini-batch
SGD (``LogisticRegressionWithSGD``), each step with about as many rows as sparcel's on eight
nodes, and the L-BFGS of ``LogisticRegression``, whose iterations each pass over all rows at least
once. The seconds of an iteration are the difference between a long and a short fit, divided by the
difference in iterations; so are the bytes, by the counters of the first node's link.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyspark
import torch
from pyspark.ml.classification import LogisticRegression
from pyspark.sql import SparkSession
from torch.distributed import TCPStore

from benchmarks.clock import crossed, took
from benchmarks.linear.data import SETS, examples, matrix, place_of, rows_of, texts
from benchmarks.record import NEEDED, Row, add, in_lab, machine, options, tell
from benchmarks.record import rows_of as recorded
from sparcel.core.comm import world
from sparcel.products.linear.gradient_descent import prepare
from sparcel.products.linear.ranks import gathered
from sparcel.products.linear.trainer import Settings
from sparcel.products.rows import shard

URLS = SETS["urls"]
ROWS_A_STEP = 8000
SHORT = 2
EPOCHS = 5
EXECUTOR_MEMORY, MOST_EXECUTOR_MEMORY = 1200, 4000
"""Megabytes of an executor that has a part of the rows, and of one that has all."""

MASTER_PORT, STORE_PORT = 7077, 7078
STEP = 50.0
"""The first step of MLlib's SGD, which shrinks by 1/√t."""

SERIAL = "-XX:+UseSerialGC"  # the nodes share the machine's cores
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"


def svmlight(work: Path, part: str) -> Path:
    """Write a part as an SVMlight file, columns counted from 1, unless it is there."""
    file = work / f"urls-{part}.svm"
    if not file.exists():
        with file.with_suffix(".part").open("w") as out:
            for label, row in texts(rows_of(URLS, work, part), 1, 7):
                out.write(f"{label} {row}\n")
        file.with_suffix(".part").rename(file)
    return file


@contextmanager
def daemon(kind: str, address: str, *arguments: str) -> Iterator[None]:
    """Run the Master or a Worker of Spark's standalone cluster."""
    name = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
    process = subprocess.Popen(
        [str(SPARK_CLASS), name, "--host", address, *arguments],
        env={**os.environ, "SPARK_LOCAL_IP": address, "SPARK_DAEMON_MEMORY": "256m"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def session(master: str, address: str, nodes: int) -> Iterator[SparkSession]:
    """Connect a driver to the cluster, once all workers are there."""
    os.environ["SPARK_LOCAL_IP"] = address
    settings = {
        "spark.driver.host": address,
        "spark.driver.memory": "3g",
        "spark.driver.maxResultSize": "0",
        "spark.driver.extraJavaOptions": SERIAL,
        "spark.executor.memory": f"{executor_memory(nodes)}m",
        "spark.executor.extraJavaOptions": SERIAL,
        "spark.cores.max": str(nodes),
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "180s",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def executor_memory(nodes: int) -> int:
    """Return the megabytes of an executor's heap."""
    return EXECUTOR_MEMORY if nodes > 1 else MOST_EXECUTOR_MEMORY


def timed(fit: Callable[[int], Any], iterations: int) -> tuple[Any, Row]:
    """Return the model of a fit, and the seconds and bytes of one of its iterations."""
    fit(SHORT)  # compiles what the timed ones run
    figures = []
    for count in (SHORT, iterations):
        before = crossed()
        seconds, _, model = took(fit, count)
        figures.append(np.array([seconds, crossed() - before]))
    seconds, sent = (figures[1] - figures[0]) / (iterations - SHORT)
    return model, {
        "iterations": iterations,
        "iteration_seconds": float(seconds),
        "bytes": round(sent),
    }


def sgd(spark: SparkSession, file: Path, rows: int, nodes: int, steps: int) -> Row:
    """Fit by MLlib's mini-batch SGD, for so many steps."""
    mllib, context = spark._jvm.org.apache.spark.mllib, spark._jsc.sc()
    dimensions, fraction = URLS.ngrams.dimensions, ROWS_A_STEP / rows
    read = mllib.util.MLUtils.loadLibSVMFile(context, f"file://{file}", dimensions, nodes)
    points = read.repartition(nodes, None).cache()
    points.count()

    def fit(count: int) -> Any:
        solver = mllib.classification.LogisticRegressionWithSGD(STEP, count, 0.0, fraction)
        solver.optimizer().setConvergenceTol(0.0)
        return solver.run(points)

    model, times = timed(fit, steps)
    points.unpersist(True)
    return {
        "solver": "Spark MLlib, mini-batch SGD",
        "iterations_an_epoch": 1 / fraction,
        **times,
        **judged(np.array(model.weights().toArray()), model.intercept(), file.parent),
    }


def l_bfgs(spark: SparkSession, file: Path, nodes: int, iterations: int) -> Row:
    """Fit by MLlib's L-BFGS, for so many iterations."""
    reader = spark.read.format("libsvm").option("numFeatures", str(URLS.ngrams.dimensions))
    data = reader.load(str(file)).repartition(nodes).cache()
    data.count()

    def fit(count: int) -> Any:
        return LogisticRegression(maxIter=count, regParam=0.0, standardization=False, tol=0.0).fit(
            data
        )

    model, times = timed(fit, iterations)
    data.unpersist(True)
    return {
        "solver": "Spark MLlib, L-BFGS",
        "iterations_an_epoch": 1,
        **times,
        **judged(model.coefficients.toArray(), model.intercept, file.parent),
    }


def sparcel(work: Path) -> Row:
    """Fit by sparcel's SGD, as `models.py` does; all ranks call."""
    torch.set_num_threads(1)
    comm, train = world(), rows_of(URLS, work, "train")
    rank, ranks = place_of(comm)
    rows = shard(train, rank, ranks)
    settings = Settings(l2=0.0, batch_size=ROWS_A_STEP // ranks)
    trainer = prepare(examples(rows), settings, comm)
    epochs = [trainer.epoch() for _ in range(EPOCHS)]
    seconds = np.max(gathered(comm, [epoch.seconds for epoch in epochs], "times"), axis=0)
    coordinates, intercepts = trainer.read()
    return {
        "solver": "sparcel, SGD",
        "iterations_an_epoch": trainer.steps,
        "iterations": EPOCHS * trainer.steps,
        "iteration_seconds": float(np.median(seconds)) / trainer.steps,
        "bytes": round(epochs[-1].volume / trainer.steps),
        **judged(coordinates[:, 0], intercepts[0], work),
    }


def judged(weights: np.ndarray, intercept: float, work: Path) -> Row:
    """Return a model's mean loss on the training rows, and its accuracy on the others."""
    train, test = (rows_of(URLS, work, part) for part in ("train", "test"))
    margins = matrix(train) @ weights + intercept
    loss = np.logaddexp(0, np.where(train.labels == "1", -margins, margins)).mean()
    found = matrix(test) @ weights + intercept > 0
    return {"train_loss": float(loss), "accuracy": float((found == (test.labels == "1")).mean())}


def node(arguments: argparse.Namespace) -> None:
    """Be one node of the lab: sparcel's rank, then Spark's worker."""
    rank, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first, work = os.environ["MASTER_ADDR"], arguments.work
    origin, found = machine(), [sparcel(work)]
    store = TCPStore(first, STORE_PORT, nodes, rank == 0, timedelta(hours=2))
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(daemon("Master", first, "--port", str(MASTER_PORT)))
        memory = ["--cores", "1", "--memory", f"{executor_memory(nodes)}m"]
        master = f"spark://{first}:{MASTER_PORT}"
        stack.enter_context(daemon("Worker", address_towards(first), *memory, master))
        if rank == 0:
            count = len(rows_of(URLS, work, "train"))
            file = svmlight(work, "train").resolve()
            spark = stack.enter_context(session(master, first, nodes))
            found.append(sgd(spark, file, count, nodes, arguments.steps))
            found.append(l_bfgs(spark, file, nodes, arguments.iterations))
            store.set("done", "")
        store.wait(["done"])
    if rank == 0:
        place = {"nodes": nodes, "network": os.environ["SPARCEL_LAB_RATE_BITS_PER_S"]}
        rows = [row for row in recorded(arguments.output) if row["nodes"] != nodes]
        for row in found:
            add(arguments.output, origin, rows, {**place, **row})
            tell(row)


def address_towards(other: str) -> str:
    """Return the address that this node has for another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, STORE_PORT))
        return str(probe.getsockname()[0])


def main() -> None:
    """Start the lab for each number of nodes, or be one of its nodes."""
    arguments = options(
        __doc__,
        "work",
        nodes=[1, 8],
        rate="1gbit",
        steps=40,
        iterations=20,
        output=NEEDED,
        in_lab=False,
    )
    if arguments.in_lab:
        node(arguments)
        return
    svmlight(arguments.work, "train")
    for nodes in arguments.nodes:
        in_lab(nodes, arguments.rate, *sys.argv[1:], "--in-lab")


if __name__ == "__main__":
    main()
