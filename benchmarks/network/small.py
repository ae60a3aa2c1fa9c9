"""A sum of few coordinates over MPI, beside what MPI itself takes for as many bytes.

Run it in each rank of an emulated cluster whose number of ranks is a power of two:

    sparcel lab run --mpi --nodes 8 --rate 1gbit -- python -m benchmarks.network.small \
        benchmarks/results/small.json

The floor is one `Sendrecv` with each partner at doubling distances, in a tight loop, with messages
as long as those of `recursive_doubling`. Beside it stands MPI's own all-reduce of a vector that
holds twice as many numbers as a rank's stream. Times are those of all ranks together, from one
barrier to the next. All rows take turns; a row's figure is the median of its turns. ``cpu_ms`` is
rank 0's processor time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch
from mpi4py import MPI

import sparcel
from benchmarks.machine import machine
from sparcel import patterns
from sparcel.bench.engines import connected
from sparcel.formats import RAW

SIZE, K = 1_000_000, 100
TURNS, CALLS, WARM_UP = 7, 300, 20

WORLD = MPI.COMM_WORLD


def sendrecv() -> Callable[[], object]:
    """Return a function that exchanges messages with each partner in turn."""
    comm = WORLD.Dup()
    rounds = []
    for peer, _, distance, _ in patterns.doubling(comm.rank, comm.size):
        nbytes = RAW.nbytes(distance * K, SIZE, 4)
        rounds.append((peer, bytearray(nbytes), bytearray(nbytes)))

    def run() -> None:
        for peer, sent, received in rounds:
            comm.Sendrecv(sent, peer, 0, received, peer, 0)

    return run


def mpi_all_reduce() -> Callable[[], object]:
    """Return MPI's own all-reduce of 2k float32."""
    comm, vector = WORLD.Dup(), np.zeros(2 * K, np.float32)
    return lambda: comm.Allreduce(MPI.IN_PLACE, vector)


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call on all ranks, and this rank's processor time."""
    for _ in range(WARM_UP):
        run()
    WORLD.Barrier()
    start, processor_start = perf_counter(), process_time()
    for _ in range(CALLS):
        run()
    used = process_time() - processor_start
    WORLD.Barrier()
    return (perf_counter() - start) / CALLS, used / CALLS


def main() -> None:
    """Time all rows, and write them from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    with connected(("mpi",)) as (engine,):
        comm = engine.comm
        generator = torch.Generator().manual_seed(comm.rank)
        stream = sparcel.topk(torch.randn(SIZE, generator=generator), K)
        rows = {
            "Sendrecv": sendrecv(),
            "Allreduce": mpi_all_reduce(),
            "all_reduce, max_nnz": lambda: sparcel.all_reduce(stream, group=comm, max_nnz=K),
            "all_reduce": lambda: sparcel.all_reduce(stream, group=comm),
        }
        turns = [{name: seconds(run) for name, run in rows.items()} for _ in range(TURNS)]
    if WORLD.rank:
        return
    medians = {
        name: {
            "ms": 1e3 * median(turn[name][0] for turn in turns),
            "cpu_ms": 1e3 * median(turn[name][1] for turn in turns),
            "to Sendrecv": median(turn[name][0] / turn["Sendrecv"][0] for turn in turns),
        }
        for name in rows
    }
    settings = {"ranks": WORLD.size, "size": SIZE, "k": K, "turns": TURNS, "calls": CALLS}
    report = {**machine(), "settings": settings, "medians": medians, "turns": turns}
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
