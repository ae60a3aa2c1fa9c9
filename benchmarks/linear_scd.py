"""Time coordinate descent on an emulated network, with sparse and with dense all-gathers.

    sparcel lab run --nodes 8 --rate 1gbit -- python benchmarks/linear_scd.py WORK \\
        --output benchmarks/results/linear_scd.json

``WORK`` is the folder that `linear_models.py` made of the URLs. Every rank changes 100 coordinates
in an iteration. Each gather takes as many iterations from the same start, in turns, ``--rounds``
times; a first iteration is not counted.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from linear_data import SETS, rows_of
from machine import machine
from record import Row, write

from sparcel.comm import Communicator, world
from sparcel.linear.ranks import gathered
from sparcel.linear.scd import Scd
from sparcel.rows import shard

GATHERS = ("dense", "sparse", "values")


class _EnoughError(Exception):
    """The iterations that are timed are over; all ranks raise it after the same step."""


def timed(gather: str, work: Path, iterations: int, comm: Communicator) -> Row:
    """Return the seconds and bytes of an iteration, the most of any rank; all ranks call."""
    rows = shard(rows_of(SETS["urls"], work, "train"), comm.rank, comm.size)
    targets = np.where(rows.labels == "1", 1, -1).astype(np.float32)
    scd = Scd(rows, targets, l2=1e-6, gather=gather, comm=comm)
    begun = [0.0, 0.0, 0]

    def after_step(step: int) -> None:
        if step == 0:
            begun[:] = [time.perf_counter(), scd.waited, comm.traffic.volume]
        if step == iterations:
            raise _EnoughError

    try:
        scd.epoch(after_step)
    except _EnoughError:
        now = [time.perf_counter(), scd.waited, comm.traffic.volume]
    took = (np.array(now) - begun) / iterations
    seconds, waited, volume = np.max(gathered(comm, took.tolist()), axis=0).tolist()
    return {"gather": gather, "iterations": iterations, "steps_an_epoch": scd.steps} | {
        "seconds": seconds,
        "communication_seconds": waited,
        "bytes": volume,
        "coordinates": len(scd.values),
    }


def main() -> None:
    """Time each gather, and write the rows from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comm = world()
    assert comm is not None, "start it with several ranks"
    rows = []
    for turn in range(arguments.rounds):
        for gather in GATHERS:
            row = timed(gather, arguments.work, arguments.iterations, comm)
            rows.append({"round": turn, "nodes": comm.size, **row})
            if comm.rank == 0:
                print(rows[-1], flush=True)
                write(arguments.output, machine(), rows)


if __name__ == "__main__":
    main()
