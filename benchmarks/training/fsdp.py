"""Models that FSDP2 shards in nodes and that are averaged over nodes, by FSDP and by sparcel.

Run it in each rank of an emulated cluster. Its nodes are the replicas, the ranks of a node the
shards. Steps, exchanges, and bytes between nodes:

    sparcel lab run --nodes 2 --ranks-per-node 4 --rate 1gbit -- \
        python -m benchmarks.training.fsdp --output benchmarks/results/fsdp_2x4.json
    sparcel lab run --nodes 4 --ranks-per-node 2 --rate 1gbit -- \
        python -m benchmarks.training.fsdp --output benchmarks/results/fsdp_4x2.json

Also at 100 Mbit/s (`--rate 100mbit --rounds 2`, fsdp_2x4_100mbit.json, fsdp_4x2_100mbit.json). What
a rank holds, and the losses of 200 steps on the text in ``DATA/tinyshakespeare``:

    sparcel lab run --nodes 2 --ranks-per-node 4 --rate none -- \
        python -m benchmarks.training.fsdp --memory --output benchmarks/results/fsdp_memory.json
    sparcel lab run --nodes 2 --ranks-per-node 2 --rate none -- \
        python -m benchmarks.training.fsdp --train DATA \
        --output benchmarks/results/fsdp_training.json

**Steps and exchanges.** All methods take turns. A time is the slowest rank's after a barrier, and
``ms`` the median of all; ``cpu_ms`` is the processor time of an average rank. A step is both
passes, the exchange and the optimiser; ``added_ms`` is what it takes longer than one of the same
turn without exchange between nodes. With "bfloat16" FSDP reduces in that dtype, in the nodes too.
An exchange is what is done with a step's gradients once they are reduced in the nodes, by itself:
FSDP's all-reduces, or the whole work of sparcel. ``speedup`` compares it with FSDP's in bfloat16.

``sent_bytes`` are what the ranks of the busiest node sent in a step, as `Handle.stats` counts them;
``predicted_bytes`` what the formula of the scheme says. They are ``exact`` where it does not matter
which coordinates the ranks select, and otherwise expected of independent selections; of FSDP they
are what rings send. ``link_bytes`` crossed the busiest link, headers and a barrier included.

**Memory.** ``held_bytes`` are all tensors of a rank between two steps, ``resident_bytes`` its
process at that time, after free memory was given back, and ``peak_bytes`` the most in three steps,
each the mean over ranks. The allocator maps larger tensors one by one, so none that is freed stays.
Each method has processes of its own. ``two_vectors_bytes`` and ``bucket_bytes`` are two float32
vectors of the shards' size, and one of the largest module's shard.

**Training.** ``loss`` is the mean of the last 20 steps over all ranks, ``held_out`` that of text
that was held out. To save time, parameters stay whole between the two passes of a step. Trainings
that the output has are not repeated.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from ctypes import CDLL
from dataclasses import replace
from itertools import groupby, product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.clock import process_bytes, resident
from benchmarks.record import Row, machine, network, options, rows_of, show, write
from benchmarks.training.fsdp_model import (
    ALONE,
    AT_10,
    HSDP,
    HSDP_HALF,
    LR,
    METHODS,
    TOPK,
    Replica,
    Shape,
    mesh_of_nodes,
    random_batches,
    vectors_of,
)
from benchmarks.training.fsdp_times import all_rows
from benchmarks.training.tasks import TASKS, Split, Task, batches, loss_of

SHAPE, LARGER, LARGEST = (384, 3), (640, 5), (1024, 5)
"""Models of 5.4, 25 and 63 million parameters: width and layers."""


IN_MEMORY = (ALONE, HSDP_HALF, TOPK, AT_10)
TRAINED = (HSDP, HSDP_HALF, TOPK, AT_10)
SEEDS = (0, 1, 2)
LAST = 20
WINDOWS = 512
"""Of how many steps the loss is a training's, and how many samples are held out."""


def remembered(shape: Shape) -> Iterator[Row]:
    """Yield what ranks hold with each method, in processes that end with it."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    server = _store(is_master=True) if os.environ["RANK"] == "0" else None
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for label in IN_MEMORY:
            yield pool.submit(_held, label, shape).result()
    del server


def _store(is_master: bool) -> dist.TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False)


def _held(label: str, shape: Shape) -> Row:
    """Return what ranks hold with a method, on average; all ranks call."""
    torch.set_num_threads(1)
    store = dist.PrefixStore(label, _store(is_master=False))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    replica = Replica(METHODS[label], mesh_of_nodes(), shape)
    batch = random_batches(1)
    for _ in range(3):
        replica.step(*next(batch))
    held = _bytes_of_tensors()
    CDLL(None).malloc_trim(0)
    figures = {"held_bytes": held, "resident_bytes": resident()}  # from which the peak begins
    for _ in range(3):
        replica.step(*next(batch))
    figures["peak_bytes"] = process_bytes("VmHWM")
    if replica.handle is not None:
        sizes = [vector.size for vector in vectors_of(replica.model)]
        figures |= {"two_vectors_bytes": 8 * sum(sizes), "bucket_bytes": 4 * max(sizes)}
    total = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(total)
    replica.close()
    dist.destroy_process_group()
    means = (total / ranks).tolist()
    return {"what": "memory", "method": label, **dict(zip(figures, means, strict=True))}


def _bytes_of_tensors() -> int:
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def trainings(data: Path, shape: Shape, steps: int, output: Path | None) -> Iterator[Row]:
    """Yield a row for each training, those first that the output has."""
    dist.init_process_group("gloo")
    mesh = mesh_of_nodes()
    task = replace(TASKS["characters"], steps=steps, batch=dist.get_world_size(), lr=LR)
    recorded = [] if output is None else rows_of(output)
    dist.barrier()  # all have read what rank 0 will write
    yield from recorded
    done = [(row["method"], row["seed"], row["steps"]) for row in recorded]
    for seed, label in product(SEEDS, TRAINED):
        if (label, seed, steps) not in done:
            yield _trained(label, seed, mesh, shape, task, task.read(data / task.folder, seed))
    dist.destroy_process_group()


def _trained(
    label: str, seed: int, mesh: DeviceMesh, shape: Shape, task: Task, split: Split
) -> Row:
    """Train with a method, and return its losses; all ranks call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replica = Replica(METHODS[label], mesh, shape, seed, frontload=True, reshard=False)
    losses, start = [], perf_counter()
    for step, batch in enumerate(batches(len(split.y_train), task.batch, task.steps, seed)):
        part = batch.chunk(ranks)[rank]
        for group in replica.optimizer.param_groups:
            group["lr"] = task.lr_at(step)
        losses.append(replica.step(split.x_train[part], split.y_train[part]))
    seconds = perf_counter() - start
    part = torch.arange(WINDOWS).chunk(ranks)[rank]
    replica.model.eval()
    with torch.no_grad():
        losses.append(loss_of(replica.model, split.x_test[part], split.y_test[part]))
    means = torch.stack(losses) / ranks
    dist.all_reduce(means)
    *by_step, held_out = means.tolist()
    compression = None if replica.handle is None else replica.handle.stats().compression
    replica.close()
    return {
        "what": "training",
        "method": label,
        "seed": seed,
        "steps": task.steps,
        "loss": mean(by_step[-LAST:]),
        "held_out": held_out,
        "seconds": seconds,
        "compression": compression,
        "losses": [round(loss, 4) for loss in by_step],
    }


def rows_for(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of what the arguments ask for; all ranks call."""
    if arguments.train is not None:
        return trainings(arguments.train, SHAPE, arguments.steps, arguments.output)
    if arguments.memory:
        return remembered(LARGEST)
    return all_rows(SHAPE, (SHAPE, LARGER), arguments.rounds, arguments.repeats)


def main() -> None:
    arguments = options(
        __doc__, rounds=5, repeats=3, memory=False, train=Path, steps=200, output=Path
    )
    torch.set_num_threads(1)  # the ranks share the cores
    rows, head = [], {**machine(), "network": network()}
    for row in rows_for(arguments):
        rows.append(row)
        if os.environ["RANK"] == "0" and arguments.output is not None:
            write(arguments.output, head, rows)
    if os.environ["RANK"] == "0":
        for _, group in groupby(rows, key=lambda row: str(row["what"])):
            show(group)


if __name__ == "__main__":
    main()
