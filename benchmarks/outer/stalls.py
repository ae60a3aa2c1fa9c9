"""How long inner steps stand still for an outer step, and what packing and unpacking takes.

    python -m benchmarks.outer.stalls
    python -m benchmarks.outer.stalls --files

Two islands with a model of 25 million parameters on emulated links of 100 Mbit/s, where a sleep
stands for the forward and backward pass. A row is a method and how many inner steps it overlaps
with: ``stood_s``, the seconds for which optimiser steps stood still for an outer step, and
``work_ns``, the processor time of the thread that trains, in ns a parameter and outer step.
Without overlap the first is the exchange; with overlap the second is packing and unpacking.
Medians of the outer steps after the first; two islands share the cores of one machine.

With ``--files`` each inner step is an outer one, of islands that meet at a port, and in a folder,
without a limit of rates. They take turns, so that a load of the machine meets both. ``ratio`` is
files by links, in the median of the rounds.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import sparcel.outer
from benchmarks.clock import gloo
from benchmarks.record import RESULTS, Row, grid, itself, options, report
from sparcel.products.meeting import Server
from sparcel.products.outer.method import METHODS
from sparcel.tools.lab import EmulatedNetwork, Link, Loopback, Network, Workers

LAYERS, WIDTH, PAUSE_S, EVERY, STEPS = 6, 2048, 0.1, 150, 6
RATE_BITS_PER_S = 100_000_000
USED, OVERLAPS = ("default", "diloco"), (0, 100)
ROUNDS = 5
"""In which links and files take turns."""


def island(method: str, overlap: int, place: str) -> None:
    """Train, and print what each outer step takes; without a place, on a rank of the lab."""
    torch.set_num_threads(1)
    model = torch.nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS))
    size = sum(one.numel() for one in model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = replace(METHODS[method](), overlap=overlap, moments=0)  # SGD has no second ones
    every = 1 if place else EVERY
    with nullcontext() if place else gloo():
        outer = sparcel.outer.attach(model, optimizer, made, every=every, islands=place or None)
        noise = torch.Generator().manual_seed(0 if place else dist.get_rank())
        for _ in range(STEPS):
            for one in model:  # so that there is something to send
                one.data.add_(torch.randn(one.shape, generator=noise), alpha=1e-3)
            seconds, processor = 0.0, 0.0
            for _ in range(every):
                time.sleep(0.0 if place else PAUSE_S)
                start, thread = time.perf_counter(), time.thread_time()
                optimizer.step()
                seconds += time.perf_counter() - start
                processor += time.thread_time() - thread
            print(json.dumps([size, seconds, 1e9 * processor / size]), flush=True)
        outer.close()


def measured(network: Network, method: str, overlap: int, place: str = "") -> Row:
    """Run two islands, and return what the first has measured."""
    argv = [sys.executable, *itself(), "--island", method, str(overlap), place]
    with network, Workers(network, argv) as workers:
        found = [json.loads(line) for rank, line in workers.lines() if rank == 0 and line[0] == "["]
    size, stood, work = (median(one) for one in zip(*found[1:], strict=True))
    return {"parameters": int(size), "stood_s": stood, "work_ns": work}


def main() -> None:
    told = options(__doc__, files=False, island={"nargs": 3})
    if told.island:
        method, overlap, place = told.island
        island(method, int(overlap), place)
        return
    if not told.files:
        jobs = grid(method=USED, overlap=OVERLAPS)
        link = Link(RATE_BITS_PER_S)
        rows = [job | measured(EmulatedNetwork(2, link), **job) for job in jobs]
        report(RESULTS / "outer_stalls.json", rows)
        return
    rows = []
    for number in range(ROUNDS):
        with TemporaryDirectory() as name, closing(Server(0, Path(name, "place"))) as server:
            places = f"tcp://127.0.0.1:{server.port}/round{number}", str(Path(name, "bucket"))
            took = [measured(Loopback(2), "default", 0, place)["stood_s"] for place in places]
        rows.append(dict(zip(("links_s", "files_s"), took, strict=True)))
    ratio = median(row["files_s"] / row["links_s"] for row in rows)
    report(RESULTS / "outer_places.json", [*rows, {"ratio": ratio}])


if __name__ == "__main__":
    main()
