"""NaN or Inf in one bucket makes the update of every parameter NaN, so every optimiser skips it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.core.training import Scope
from tests.ddp.models import LARGE, MANY_BUCKETS, SHAPES, Linear, Poison, observe, residuals_of
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes

BY_OPTIMISER = (("first", "bias"), ("second", "norm", "third"))
"""The parameters of two optimisers; "first" and "second" are in different buckets."""

VOID = 2
"""The step that is poisoned."""


def train_by_two(
    comm: Communicator,
    steps: list[int],
    poison: Poison,
    scalers: int,
    wrap: dict[str, Any],
    micro_steps: int = 1,
    scheme: str = "topk",
    scope: Scope = "bucket",
) -> dict[str, Any]:
    """Train by two optimisers that share a scaler, or have one each, or have none.

    Only rank 1 is poisoned, and only the first pass of the step. Without a scaler the optimisers
    skip a step with NaN by themselves.
    """
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS, **wrap)
    made = [torch.amp.GradScaler("cpu", 1024.0, growth_interval=2) for _ in range(scalers)]
    handle = attach_evenly(ddp, scheme, scaler=made[0] if made else None, scope=scope)
    optimisers = [
        torch.optim.SGD([ddp.module.get_parameter(name) for name in names], lr=0.5, momentum=0.5)
        for names in BY_OPTIMISER
    ]
    voided: dict[str, Tensor] = {}
    for step in steps:
        ddp.zero_grad()
        for number in range(micro_steps):
            ddp.require_backward_grad_sync = number == micro_steps - 1  # as no_sync() does
            poisoned = step == VOID and comm.rank == 1 and number == 0
            loss = ddp(comm.rank, 10 * number + step, poison=poison if poisoned else None)
            scaled = [scaler.scale(loss) for scaler in made]  # all scales are equal
            (scaled[0] if made else loss).backward()
        if step == VOID:
            voided = observe(ddp)
        for optimiser, scaler in zip(optimisers, (made * 2)[:2] or (None, None), strict=True):
            if scaler is not None:
                scaler.step(optimiser)
            elif not any(update.isnan().any() for update in observe(ddp).values()):
                optimiser.step()
        for scaler in made:
            scaler.update()
    residuals = residuals_of(handle, comm.rank)
    handle.close()
    return {
        "voided": voided,
        "residuals": residuals,
        "scales": [scaler.get_scale() for scaler in made],
        "weights": {name: p.detach() for name, p in ddp.module.named_parameters()},
    }


WRAPS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize(
    ("wrap", "scalers", "poison", "micro_steps", "scope"),
    [
        ("copies", 1, ("first", math.inf), 1, "bucket"),
        ("copies", 2, ("second", math.nan), 2, "model"),
        ("views", 0, ("norm", math.nan), 2, "bucket"),
        ("static graph", 1, ("first", -math.inf), 1, "model"),
        ("unused", 2, ("first", math.inf), 1, "bucket"),
    ],
)
def test_every_optimiser_skips_a_void_step(
    run_on: Any, wrap: str, scalers: int, poison: Poison, micro_steps: int, scope: Scope
) -> None:
    program = partial(
        train_by_two,
        poison=poison,
        scalers=scalers,
        wrap=WRAPS[wrap],
        micro_steps=micro_steps,
        scope=scope,
    )
    without = run_on(2, partial(program, steps=[0, 1, 3, 4]))
    for mine, theirs in zip(
        run_on(2, partial(program, steps=[0, 1, 2, 3, 4])), without, strict=True
    ):
        assert mine["voided"].keys() == SHAPES.keys()
        assert all(update.isnan().all() for update in mine["voided"].values())
        assert set(mine["scales"]) <= {2048.0}  # halved once, and doubled twice
        for kind in ("residuals", "weights"):
            for name, part in theirs[kind].items():
                assert torch.equal(mine[kind][name], part), name
        assert any(mine["residuals"][name].any() for name in LARGE)


@pytest.mark.parametrize(
    ("scheme", "wrap"),
    [
        ("dense", "copies"),
        ("bidirectional", "static graph"),
        ("oktopk", "copies"),
        ("hitopk", "static graph"),
    ],
)
def test_the_first_step_can_be_void(run_on: Any, scheme: str, wrap: str) -> None:
    """DDP calls the hooks of a static graph's first step after the backward pass."""
    program = partial(
        train_by_two,
        steps=[VOID],
        poison=("first", math.inf),
        scalers=1,
        wrap=WRAPS[wrap],
        scheme=scheme,
    )
    for seen in run_on(2, program):
        assert all(update.isnan().all() for update in seen["voided"].values())
        assert not any(weight.any() for weight in seen["weights"].values())
        assert not any(owed.any() for owed in seen["residuals"].values())


def run_out_of_data(comm: Communicator) -> tuple[dict[str, Tensor], ...]:
    """Return rank 0's update of a void step in which rank 1 has no data, and the memory around it.

    Rank 1 does one step and joins; DDP calls its hooks without a pass in the second step.
    """
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    handle = attach_evenly(ddp, "topk")
    with ddp.join():
        for step in range(2 - comm.rank):
            ddp.zero_grad()
            poison = ("first", math.inf) if step == 1 else None
            before = residuals_of(handle, comm.rank)
            ddp(comm.rank, step, poison=poison).backward()
    after = residuals_of(handle, comm.rank)
    assert handle.stats().training_steps == 1
    handle.close()
    return observe(ddp), before, after


def test_a_step_without_some_ranks_can_be_void(run_on: Any) -> None:
    update, before, after = run_on(2, run_out_of_data)[0]
    assert all(part.isnan().all() for part in update.values())
    for name in LARGE:
        assert before[name].any()
        assert torch.equal(before[name], after[name])
