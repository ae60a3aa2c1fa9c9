"""What training ends at for the bytes that it sends, with any density, format and method.

    python -m benchmarks.training.frontier DATA --runs dense oktopk,0.08,packed:4,front

A run is named by scheme, density and format, as in ``bidirectional,0.1/0.3,packed:4/6``, where
owners return 0.3 of their sums, in 6 bits; by ``front`` if its first steps send more, or by the
densities of its first steps, as in ``1:0.5*40`` for 40 steps each; and by ``still`` if it does not
step ahead. Or it is one of torch's hooks: ``bf16``, ``fp16``, ``powersgd,RANK`` or
``powersgd,RANK,START`` (see `train_with_hook`).
``DATA``, tasks, seeds and the simulated cluster are those of `convergence.py`; collectives are
chosen for links of 100 Mbit/s.

Rows of the record tell ``share``: the bytes of a step at the worst rank, of those that a ring takes
for the gradient in float32. Runs that the record has already are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import Row, among, grid, run_all, runs_told
from benchmarks.training.convergence import RANKS, SUITE
from benchmarks.training.task_training import Method, Run, evaluate, train
from benchmarks.training.tasks import TASKS
from sparcel.core.cost import stated_rates
from sparcel.core.formats import format_named

VALUE_BYTES = 4
LINK = 12.5e6
"""Bytes a second, 100 Mbit/s."""
LATENCY_S = 100e-6


START = 10
"""Dense steps before PowerSGD begins, where no other number is given; torch's default, 1000, is
half of a training here."""

HALVES: dict[str, Callable[..., Any]] = {
    # DDP refuses this hook by its name on every engine but NCCL.
    "bf16": lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket),
    "fp16": default_hooks.fp16_compress_hook,
}


def train_with_hook(data: Path, task: str, hook: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once with one of torch's hooks, in one process with whole batches; return the row.

    For PowerSGD this is what any number of ranks does, up to the order of sums: its products and
    its error feedback are linear in the gradient, and the ranks' parts of the batch are equal. With
    the half-precision hooks the ranks' mean is rounded, where a cluster rounds each rank's gradient
    and the sums.

    ``"powersgd,RANK,START"`` has more dense steps before PowerSGD begins.

    ``share`` is that of the values in a step's messages, of those in float32, mean over the steps.
    """
    run = Run(data, replace(TASKS[task], steps=steps), Method(hook, "dense"), seed)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # PowerSGD hangs over Gloo with several buckets.
        model = DistributedDataParallel(run.model, bucket_cap_mb=1000)
        share = register(model, hook, steps)
        run.alone(model)
        return {**evaluate(run.model, run.split), "train_losses": run.smoothed(), "share": share()}
    finally:
        dist.destroy_process_group()


def register(model: DistributedDataParallel, hook: str, steps: int) -> Callable[[], float]:
    """Register a hook of torch, and return what tells the share of bytes after the training."""
    if hook in HALVES:
        model.register_comm_hook(None, HALVES[hook])
        return lambda: 0.5
    _, rank, *later = hook.split(",")
    start = int(later[0]) if later else START
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=int(rank), start_powerSGD_iter=start
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def share() -> float:
        _, before, after = state.compression_stats()
        return (start + (steps - start) * after / before) / steps

    return share


def trained(data: Path, task: str, run: str, seed: int, ranks: int, steps: int) -> Row:
    """Train once, and return the row."""
    usual = TASKS[task]
    about = {"kind": usual.kind, "optimizer": usual.optimizer}
    if run in HALVES or run.startswith("powersgd,"):
        return {**about, **train_with_hook(data, task, run, seed, steps)}
    rates = stated_rates(bandwidth=LINK, latency_s=LATENCY_S, ranks=ranks)
    row = train(data, task, method_of(run), seed, ranks, usual.batch, usual.lr, steps, rates)
    model = usual.model(usual.read(data / usual.folder, seed))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dense = 2 * (ranks - 1) / ranks * VALUE_BYTES * parameters
    return {**about, **row, "parameters": parameters, "share": row["bytes_a_step"] / dense}


def method_of(run: str) -> Method:
    """Return the method that a run names."""
    scheme, *rest = run.split(",")
    if not rest:
        return Method(run, scheme)
    densities, formats, *words = rest
    density, _, returned = densities.partition("/")
    format, _, answer = formats.partition("/")
    settings: dict[str, Any] = {"density": float(density), "format": format}
    if returned:
        settings["returned"] = float(returned)
    if answer:
        settings["answer"] = f"{format_named(format).indices}:{answer}"
    for first in set(words) - {"front", "still"}:
        densities, _, steps = first.partition("*")
        settings["warmup"] = [float(one) for one in densities.split(":")]
        settings["warmup_steps"] = int(steps)
    return Method(run, scheme, settings, ahead="still" not in words, frontload="front" in words)


def main() -> None:
    told = runs_told(
        __doc__,
        "frontier",
        tasks=among(TASKS, SUITE),
        runs={"nargs": "+", "required": True},
        seeds=[0],
        ranks=RANKS,
        fewer_steps=1.0,
    )
    jobs = grid(seed=told.seeds, run=told.runs, task=told.tasks, ranks=[told.ranks])
    for job in jobs:
        job["steps"] = round(TASKS[job["task"]].steps / told.fewer_steps)
    run_all(told, trained, jobs)


if __name__ == "__main__":
    main()
