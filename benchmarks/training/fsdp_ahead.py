"""What step-ahead takes of a step of a sharded model: with and without it, in turns.

    sparcel lab run --nodes 2 --ranks-per-node 2 --rate 1gbit -- \
        python -m benchmarks.training.fsdp_ahead --output benchmarks/results/fsdp_ahead.json

The model, and the nodes that are its replicas, are those of `fsdp.py`. A step is both passes, the
exchange and the optimiser: the slowest rank's after a barrier, and ``cpu_ms`` the processor time of
an average rank. A figure is the median over `STEPS` steps, after `WARM_UP` steps.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.clock import Clock, Timed
from benchmarks.record import Row, machine, network, options, show, write
from benchmarks.training.fsdp import SHAPE
from benchmarks.training.fsdp_model import METHODS, TOPK, Replica, mesh_of_nodes, random_batches
from sparcel.core.comm import resolve

STEPS, WARM_UP, BATCH = 40, 5, 8


def rows_of_turns() -> list[Row]:
    """Return a row for training with step-ahead and one for training without it; all call."""
    mesh, clock, batches = mesh_of_nodes(), Clock(resolve(None)), random_batches(BATCH)
    replicas = {
        ahead: Replica(replace(METHODS[TOPK], ahead=ahead), mesh, SHAPE) for ahead in (True, False)
    }
    times: dict[bool, list[Timed]] = {True: [], False: []}
    for step in range(WARM_UP + STEPS):
        for ahead in (step % 2 == 0, step % 2 == 1):
            x, y = next(batches)
            times[ahead].append(clock.timed(partial(replicas[ahead].step, x, y)))
    for replica in replicas.values():
        replica.close()
    return [
        {
            "ahead": ahead,
            "parameters": replicas[ahead].parameters,
            "ms": median(one.ms for one in found[WARM_UP:]),
            "cpu_ms": median(one.cpu_ms for one in found[WARM_UP:]),
        }
        for ahead, found in times.items()
    ]


def main() -> None:
    arguments = options(__doc__, output=Path)
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    rows = rows_of_turns()
    if os.environ["RANK"] == "0":
        show(rows)
        if arguments.output is not None:
            write(arguments.output, {**machine(), "network": network()}, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
