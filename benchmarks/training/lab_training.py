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

import math
from collections.abc import Iterator, Sequence
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
from benchmarks.pages.tables import over_seeds, perplexity, table
from benchmarks.record import NEEDED, Row, among, grid, options, rows_of, run_here
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


TRAININGS = (
    *("task", "method", "ms a step", "minutes", "perplexity over DDP", "fewer bytes"),
    *("seconds to + 1 %", "ms a step at 1 Gbit/s", "seconds to + 1 %"),
)
SLOW, FAST = "100mbit", "1gbit"
FRONT = "medium words"
CALLED = {
    "PowerSGD 4": "PowerSGD",
    "sparcel": "sparcel",
    "sparcel 10 %": "at 10 %",
    "bf16": "bfloat16",
}
"""What the front page's picture calls methods."""


def lab_rows() -> list[Row]:
    """Return the record's rows."""
    return rows_of("lab_training")


def trainings_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of all whole trainings at 100 Mbit/s and of DDP alone without a limit.

    A training's seconds to + 1 % are those until it reaches DDP's perplexity at the end + 1 %.
    Losses do not depend on the network. So at 1 Gbit/s they are the seconds of the same step; after
    a training that was not whole, of steps times a step's time.
    """
    base = {_training(row): row for row in rows if row["method"] == "DDP"}
    reached = {id(row): place for row, place in _reached(rows)}
    fast = {(row["task"], row["method"]): row for row in rows if row["network"] == FAST}
    shown = sorted(
        (row for row in whole(rows) if row["network"] != FAST),
        key=lambda row: (row["task"], row["method"] != "DDP", row["step_s"]),
    )
    return table(
        TRAININGS,
        (
            [
                *_cells(row, base[_training(row)]),
                *_seconds(reached.get(id(row)), fast.get((row["task"], row["method"]))),
            ]
            for row in shown
        ),
    )


def _cells(row: Row, base: Row) -> Sequence[str]:
    return (
        *(row["task"], row["method"], f"{1e3 * row['step_s']:.0f}"),
        f"{row['train_seconds'][-1] / 60:.1f}",
        f"{over_seeds(perplexity([(row, base)]), 1)} %",
        f"{row['compression']:.1f}×",
    )


def _seconds(reached: tuple[int, float] | None, fast: Row | None) -> Iterator[str]:
    step, second = reached or (None, None)
    yield "" if second is None else f"{second:.0f}"
    if fast is None:
        yield from ("", "")
        return
    measured = {at: after for at, after, _ in fast["held_out"]}
    yield f"{1e3 * fast['step_s']:.0f}"
    yield "" if step is None else f"{measured.get(step, step * fast['step_s']):.0f}"


def _reached(rows: Sequence[Row]) -> Iterator[tuple[Row, tuple[int, float] | None]]:
    """Yield the trainings at 100 Mbit/s, and at which step and second they reach the perplexity."""
    base = {_training(row): row for row in rows if row["method"] == "DDP"}
    for row in whole(rows):
        if row["network"] == SLOW:
            *_, (_, _, final) = base[_training(row)]["held_out"]
            wanted = final + math.log(1.01)
            reached = [(step, second) for step, second, loss in row["held_out"] if loss <= wanted]
            yield row, reached[0] if reached else None


def whole(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of whole trainings; others were made to time steps."""
    longest = {
        row["task"]: max(one["steps"] for one in rows if one["task"] == row["task"]) for row in rows
    }
    return [row for row in rows if row["steps"] == longest[row["task"]]]


def _training(row: Row) -> tuple[str, int, int]:
    return row["task"], row["steps"], row["seed"]


def front(rows: Sequence[Row]) -> tuple[Row, dict[str, tuple[Row, str]]]:
    """Return DDP's row, and of each method on the slow links its row and how it fares."""
    (base,) = (row for row in whole(rows) if (row["task"], row["method"]) == (FRONT, "DDP"))
    told = {}
    for row, _ in _reached(rows):
        if row["task"] == FRONT:
            (above,) = perplexity([(row, base)])
            where = f"{abs(above):.1f} % {'above' if above > 0 else 'below'}"
            minutes = row["train_seconds"][-1] / 60
            told[CALLED[row["method"]]] = row, f"ends {where} after {minutes:.1f} min"
    return base, told


def front_sentence(rows: Sequence[Row]) -> str:
    """Return what pages say that show the front page's picture."""
    told = {name: text for name, (_, text) in front(rows)[1].items()}
    return (
        f"Beside plain DDP's perplexity, sparcel {told['sparcel']}, at 10 % it"
        f" {told['at 10 %']}, bfloat16 {told['bfloat16']}, and PowerSGD {told['PowerSGD']}."
    )


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
