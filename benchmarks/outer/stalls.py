"""How long inner steps stand still for an outer step, and what packing and unpacking takes.

    python -m benchmarks.outer.stalls

Two islands with a model of 25 million parameters on emulated links of 100 Mbit/s, where a sleep
stands for the forward and backward pass. A row is a method and how many inner steps it overlaps
with: ``stood_s``, the seconds for which optimiser steps stood still for an outer step, and
``work_ns``, the processor time of the thread that trains, in ns a parameter and outer step.
Without overlap the first is the exchange; with overlap the second is packing and unpacking.
Medians of the outer steps after the first; two islands share the cores of one machine.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

import sparcel.outer
from benchmarks.record import RESULTS, Row, grid, report
from sparcel.products.outer.method import METHODS
from sparcel.tools.lab import EmulatedNetwork, Line, Link, Workers

LAYERS, WIDTH, PAUSE_S, EVERY, ROUNDS = 6, 2048, 0.1, 150, 4
RATE_BITS_PER_S = 100_000_000
METHODS_USED, OVERLAPS = ("default", "diloco"), (0, 100)


def island(name: str, overlap: int) -> None:
    """Train on this rank, and print what was measured."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS))
    size = sum(one.numel() for one in model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = sparcel.outer.attach(
        model, optimizer, replace(METHODS[name](), overlap=overlap), every=EVERY
    )
    noise = torch.Generator().manual_seed(dist.get_rank())
    stood, work = [], []
    for _ in range(ROUNDS):
        seconds, processor = 0.0, 0.0
        for step in range(EVERY):
            if step == 0:  # so that there is something to send
                for one in model:
                    one.data.add_(torch.randn(one.shape, generator=noise), alpha=1e-3)
            time.sleep(PAUSE_S)
            start, thread = time.perf_counter(), time.thread_time()
            optimizer.step()
            seconds += time.perf_counter() - start
            processor += time.thread_time() - thread
        stood.append(seconds)
        work.append(1e9 * processor / size)
    print(f"row {size} {median(stood[1:])} {median(work[1:])}", flush=True)
    outer.close()
    dist.destroy_process_group()


def measured(method: str, overlap: int) -> Row:
    """Run two islands, and return what the first has measured."""
    argv = [sys.executable, "-m", "benchmarks.outer.stalls", "--island", method, str(overlap)]
    found: list[list[str]] = []
    with (
        EmulatedNetwork(2, Link(RATE_BITS_PER_S)) as network,
        Workers(network, argv, None, 1, False) as workers,
    ):
        for event in workers.events():
            if isinstance(event, Line) and event.text.startswith("row") and event.rank == 0:
                found.append(event.text.split()[1:])
    ((size, stood, work),) = found
    return {"parameters": int(size), "stood_s": float(stood), "work_ns": float(work)}


def main() -> None:
    if "--island" in sys.argv:
        island(sys.argv[-2], int(sys.argv[-1]))
        return
    jobs = grid(method=METHODS_USED, overlap=OVERLAPS)
    report(RESULTS / "outer_stalls.json", [job | measured(**job) for job in jobs])


if __name__ == "__main__":
    main()
