"""Time epochs of linear models on simulated clusters, at the rates of fast networks.

    python -m benchmarks.linear.rates --output benchmarks/results/linear_rates.json

``--work`` holds the caches that benchmarks/linear/models.py made. The ranks run in turns in one
process, which counts the processor time of each between its messages. The trace of an epoch is then
replayed on each network, as if every rank had a core of its own, as fast as this machine's.

On each network, ``seconds`` are an epoch's at the slowest rank, and ``communication_seconds`` what
of them is more than ``compute_seconds``, the most processor time of any rank outside of exchanges.
As in `Epoch`, the sums of an all-reduce count as exchange, and those of owners do not.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from benchmarks.linear.data import SETS, WORK, examples, rows_of
from benchmarks.record import NEEDED, Row, among, options, run_here
from sparcel import simulate
from sparcel.core.comm import Network
from sparcel.core.comm.simulated import Report, SimulatedCommunicator
from sparcel.products.linear.gradient_descent import prepare
from sparcel.products.linear.trainer import Epoch, Settings
from sparcel.products.rows import shard

NETWORKS = {
    "Cray Aries": Network(latency_s=1.3e-6, bandwidth=10e9),
    "InfiniBand FDR": Network(latency_s=1.1e-6, bandwidth=6.8e9),
    "Gigabit Ethernet": Network(latency_s=50e-6, bandwidth=125e6),
}
"""Latency of a message, and bytes a second of a node in each direction. SparCML names the networks
and gives no rates. FDR's 56 Gbit/s are 6.8 GB/s of data (64 of 66 bits). The other numbers are what
MPI usually reaches on such networks, rounded: assumed, not measured."""

JOBS = [
    {"set": name, "ranks": ranks, "algorithm": algorithm, "loss": "logistic"}
    for name, ranks, paper in (
        ("urls", 32, "recursive_doubling"),
        ("urls", 8, "split_allgather"),
        ("posts-reviews", 8, "split_allgather"),
    )
    for algorithm in ("dense", paper, "sharded")
]
"""Rows of SparCML's Table 2, with `sharded` beside them. Webspam's on 32 nodes has none: 32 whole
models of 16.6 million dimensions, and dense gradients, would take 7 GB of this process."""

CLOCK = "sparcel.products.linear.trainer.time"

Marked = tuple[Epoch, int, int]
"""An epoch, and which of its rank's events in the trace are its first and the next one's first."""


def measure(work: Path, epochs: int = 5, **job: str | int) -> Row:
    """Run a job on the simulated cluster and return its row."""
    rows = rows_of(SETS[str(job["set"])], work, "train")
    classes = np.unique(rows.labels)
    settings = Settings(loss=str(job["loss"]), l2=0.0, algorithm=str(job["algorithm"]))
    ranks, steps = int(job["ranks"]), []

    def on_rank(comm: SimulatedCommunicator) -> list[Marked]:
        own = shard(rows, comm.rank, ranks)
        sgd = prepare(examples(own, classes[1]), settings, comm)
        steps.append(sgd.steps)
        events, marked = comm.cluster.trace.events[comm.rank], []
        for _ in range(1 + epochs):
            start = len(events)
            marked.append((sgd.epoch(), start, len(events)))
        return marked[1:]  # the first one's work includes that of preparing

    clock = SimpleNamespace(perf_counter=time.thread_time)
    with patch(CLOCK, clock):
        report = simulate(ranks, on_rank, cpu_time=True)
    by_epoch = [list(marks) for marks in zip(*report.results, strict=True)]
    parts = [epoch_of(report, marks) for marks in by_epoch]
    compute = [max(e.seconds - e.communication_seconds for e, *_ in marks) for marks in by_epoch]
    return {
        **job,
        "steps": steps[0],
        "bytes": [max(epoch.volume for epoch, *_ in marks) for marks in by_epoch],
        "compute_seconds": compute,
        "networks": {name: timed(parts, compute, one) for name, one in NETWORKS.items()},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def epoch_of(report: Report[list[Marked]], marks: Sequence[Marked]) -> Report[list[Marked]]:
    """Return the report of one epoch: what it sent was all received before the next began."""
    trace = type(report.trace)(len(marks))
    for name in ("sources", "destinations", "nbytes"):
        setattr(trace, name, getattr(report.trace, name))
    for rank, (_, start, end) in enumerate(marks):
        trace.events[rank] = report.trace.events[rank][start:end]
        work = report.trace.work[rank].items()
        own = {place - start: seconds for place, seconds in work if start <= place < end}
        trace.work[rank] = defaultdict(float, own)
    return replace(report, trace=trace)


def timed(parts: Sequence[Report[list[Marked]]], compute: Sequence[float], network: Network) -> Row:
    """Return what the epochs take on a network."""
    seconds = [part.seconds_on(network) for part in parts]
    rest = [whole - own for whole, own in zip(seconds, compute, strict=True)]
    return {
        "latency_s": network.latency_s,
        "bandwidth": network.bandwidth,
        "seconds": seconds,
        "communication_seconds": rest,
    }


def main() -> None:
    """Run the jobs that the record lacks, one after the other."""
    arguments = options(__doc__, work=WORK, sets=among(SETS), output=NEEDED)
    jobs = [job for job in JOBS if job["set"] in arguments.sets]
    run_here(arguments.output, partial(measure, arguments.work), jobs)


if __name__ == "__main__":
    main()
