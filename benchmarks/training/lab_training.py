"""Train over an emulated network, densely and with sparse methods, and record loss against time.

Run it in each rank of an emulated cluster:

    sparcel lab run --nodes 8 --rate 100mbit -- python -m benchmarks.training.lab_training DATA \
        --task speech --output benchmarks/results/lab_training.json

``DATA`` holds the folders of the tasks. The methods train one after the other, from the same start
and on the same batches: DistributedDataParallel alone, with hooks of torch, and with sparcel as
`sparcel.attach` does it if no method is named, and at 10 %. The time of a step contains all that a
user waits for: the batch, both passes, the exchange and the optimiser; ``step_s`` is the median of
the second half of a training, after those steps that send more. In that half rank 0 evaluates the
model every now and then, while the clock stands. Trainings that the output has are not repeated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparcel
from benchmarks.clock import gloo
from benchmarks.record import NEEDED, Row, among, grid, options, run_here
from benchmarks.training.frontier import register
from benchmarks.training.task_training import Method, Run, evaluate
from benchmarks.training.tasks import TASKS, batches, loss_of
from sparcel.core.schemes import SPARSER, Settings

POINTS = 50
HELD_OUT = 20
"""How often the model is evaluated in the second half of a training, on `WINDOWS` samples."""
WINDOWS = 500

HOOKS = {"DDP": None, "bf16": "bf16", "PowerSGD 4": "powersgd,4"}
"""Hooks of torch, by the methods' labels."""

ONE_BUCKET = {"bucket_cap_mb": 1000}
"""For PowerSGD: with several buckets, its collectives over Gloo interleave differently on ranks."""

SETTINGS: dict[str, Settings] = {"sparcel": {}, "sparcel 10 %": SPARSER}
"""What `sparcel.attach` is told, by the methods' labels."""

METHODS = (*HOOKS, *SETTINGS)


def trained(data: Path, task: str, network: str, seed: int, steps: int, method: str) -> Row:
    """Train with one method and return its row, which is whole on rank 0; all ranks call."""
    run = Run(data, replace(TASKS[task], steps=steps), Method(method, "dense"), seed)
    handle, hook = None, HOOKS.get(method)
    buckets = ONE_BUCKET if method.startswith("PowerSGD") else {}
    model = DistributedDataParallel(run.model, gradient_as_bucket_view=True, **buckets)
    if method in SETTINGS:
        handle = sparcel.attach(model, optimizer=run.optimizers[0], **SETTINGS[method])
    share = register(model, hook, steps) if hook else lambda: 1.0
    rank, ranks, split = dist.get_rank(), dist.get_world_size(), run.split
    windows = replace(split, x_test=split.x_test[:WINDOWS], y_test=split.y_test[:WINDOWS])
    second_half = range(steps // 2, steps)
    looked_at = {second_half[-1 - len(second_half) * n // HELD_OUT] for n in range(HELD_OUT)}
    seconds: list[float] = []
    held_out: list[tuple[int, float, float]] = []
    dist.barrier()
    start = perf_counter()
    for step, batch in enumerate(batches(len(split.y_train), run.task.batch, steps, seed)):
        part = batch.chunk(ranks)[rank]
        model.zero_grad()
        loss = loss_of(model, split.x_train[part], split.y_train[part])
        loss.backward()
        run.update(step)
        run.losses[step] = loss.item() / ranks
        seconds.append(perf_counter() - start)
        if step in looked_at:
            if rank == 0:
                loss_now = evaluate(run.model, windows)["loss"]
                held_out.append((step + 1, seconds[-1], loss_now))
                run.model.train()
            dist.barrier()
            start = perf_counter() - seconds[-1]
    losses = torch.tensor(run.losses)
    dist.all_reduce(losses)
    run.losses = losses.tolist()
    compression = 1 / share()
    if handle is not None:
        compression = handle.stats().compression
        handle.close()
    return {
        "ranks": ranks,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        **(evaluate(run.model, split) if rank == 0 else {}),
        "compression": compression,
        "step_s": median(end - start for start, end in pairwise(seconds[steps // 2 :])),
        "held_out": held_out,
        "train_losses": run.smoothed(POINTS),
        "train_seconds": [float(part[-1]) for part in torch.tensor(seconds).tensor_split(POINTS)],
    }


def main() -> None:
    """Train with each method, and write the rows from rank 0."""
    arguments = options(
        __doc__,
        "data",
        task={"choices": TASKS, "default": "speech"},
        seed=0,
        steps=int,
        network="100mbit",
        methods=among(METHODS),
        output=NEEDED,
    )
    jobs = grid(
        task=[arguments.task],
        network=[arguments.network],
        seed=[arguments.seed],
        steps=[arguments.steps or TASKS[arguments.task].steps],
        method=arguments.methods,
    )
    with gloo() as rank:
        run_here(arguments.output, partial(trained, arguments.data), jobs, rank, dist.barrier)


if __name__ == "__main__":
    main()
