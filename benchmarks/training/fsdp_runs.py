"""What ranks hold, and how the loss falls, for `fsdp.py`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from ctypes import CDLL
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.record import Row, rows_of
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
from benchmarks.training.tasks import TASKS, Split, Task, batches, loss_of

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
    figures = {"held_bytes": _bytes_of_tensors(), "resident_bytes": _process_bytes("VmRSS")}
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    for _ in range(3):
        replica.step(*next(batch))
    figures["peak_bytes"] = _process_bytes("VmHWM")
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


def _process_bytes(name: str) -> int:
    """Return what the kernel says of this process, after free memory was given back."""
    CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return 1024 * kilobytes


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
