"""Training with the communication hooks of torch: what users have without sparcel.

One process trains with the whole batch under DDP and the hook. For PowerSGD this is what any number
of ranks does, up to the order of sums: its products and its error feedback are linear in the
gradient, and the ranks' parts of the batch are equal. With the half-precision hooks the ranks' mean
is rounded, where a cluster rounds each rank's gradient and the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training.task_training import Method, Run, evaluate
from benchmarks.training.tasks import TASKS

START = 10
"""Dense steps before PowerSGD begins, where no other number is given; torch's default, 1000, is
half of a training here."""

HALVES: dict[str, Callable[..., Any]] = {
    # DDP refuses this hook by its name on every engine but NCCL.
    "bf16": lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket),
    "fp16": default_hooks.fp16_compress_hook,
}


def train_with_hook(data: Path, task: str, hook: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once with ``"bf16"``, ``"fp16"`` or ``"powersgd,RANK"``, and return the row.

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
        return {
            **evaluate(run.model, run.split),
            "train_losses": run.smoothed(),
            "share": share(),
        }
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
