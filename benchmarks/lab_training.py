"""Train over an emulated network, densely and with sparse methods, and record loss against time.

Run it in each rank of an emulated cluster:

    sparcel lab run --nodes 8 --rate 100mbit -- python benchmarks/lab_training.py DATA \
        --task speech --output benchmarks/results/lab_training.json

``DATA`` holds the folders of the tasks. The methods train one after the other, from the same start
and on the same batches. ``DDP`` is DistributedDataParallel alone; the others are attached to it
with nothing but a density. The time of a step contains all that a user waits for: the batch, both
passes, the exchange and the optimiser. Trainings that the output has are not repeated.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from convergence import JUDGED, METHODS
from machine import machine
from record import Row, rows_of, write
from task_training import Method, Run, evaluate
from tasks import TASKS, batches, loss_of
from torch.nn.parallel import DistributedDataParallel

import sparcel

POINTS = 50
DDP = Method("DDP", "dense")
TRAINED = (
    DDP,
    Method("dense bf16", "dense", {"wire": "bfloat16"}),
    *(method for method in METHODS if method.label in JUDGED),
)


def trained(arguments: argparse.Namespace, method: Method) -> Row:
    """Train with one method and return its row; all ranks call."""
    task = TASKS[arguments.task]
    task = replace(task, steps=arguments.steps or task.steps)
    run = Run(arguments.data, task, method, arguments.seed)
    model = DistributedDataParallel(run.model, gradient_as_bucket_view=True)
    handle = None
    if method is not DDP:
        handle = sparcel.attach(model, run.scheme, optimizer=run.optimizer)
    rank, ranks, split = dist.get_rank(), dist.get_world_size(), run.split
    seconds = []
    dist.barrier()
    start = perf_counter()
    for step, batch in enumerate(
        batches(len(split.y_train), task.batch, task.steps, arguments.seed)
    ):
        part = batch.chunk(ranks)[rank]
        run.optimizer.zero_grad()
        loss = loss_of(model, split.x_train[part], split.y_train[part])
        loss.backward()
        run.update(step)
        run.losses[step] = loss.item() / ranks
        seconds.append(perf_counter() - start)
    losses = torch.tensor(run.losses)
    dist.all_reduce(losses)
    run.losses = losses.tolist()
    compression = 1.0
    if handle is not None:
        compression = handle.stats().compression
        handle.close()
    return {
        "task": task.name,
        "method": method.label,
        "seed": arguments.seed,
        "steps": task.steps,
        "network": arguments.network,
        "ranks": ranks,
        **evaluate(run.model, split),
        "compression": compression,
        "train_losses": run.smoothed(POINTS),
        "train_seconds": [float(part[-1]) for part in torch.tensor(seconds).tensor_split(POINTS)],
    }


def main() -> None:
    """Train with each method, and write the rows from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder that holds the tasks' folders")
    parser.add_argument("--task", choices=TASKS, default="speech")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the task's")
    parser.add_argument("--network", default="100mbit", help="what the lab was told, to record it")
    parser.add_argument("--methods", nargs="+", metavar="LABEL", help="default: all")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, origin = rows_of(arguments.output), machine()
    done = [(row["task"], row["network"], row["seed"], row["steps"], row["method"]) for row in rows]
    steps = arguments.steps or TASKS[arguments.task].steps
    training = arguments.task, arguments.network, arguments.seed, steps
    dist.barrier()  # all have read what rank 0 will write
    for method in TRAINED:
        wanted = arguments.methods is None or method.label in arguments.methods
        if not wanted or (*training, method.label) in done:
            continue
        row = trained(arguments, method)
        rows.append({**row, "commit": origin["commit"], "date": origin["date"]})
        if dist.get_rank() == 0:
            print(
                f"{row['task']}, {row['method']}: {row['train_seconds'][-1]:.0f} s,"
                f" {row['accuracy']:.2%}, loss {row['loss']:.4f}",
                flush=True,
            )
            write(arguments.output, origin, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
