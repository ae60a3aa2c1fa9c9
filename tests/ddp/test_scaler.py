"""Operations between backward() and step(): GradScaler, NaN and Inf, clipping."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.core.schemes import GTopK, Hierarchical
from tests.ddp.models import MANY_BUCKETS, Linear, Poison, observe, residuals_of
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes


def train_scaled(
    comm: Communicator,
    steps: list[int],
    scale: float | None,
    poison: Poison | None = None,
    poisoned_step: int | None = None,
    growth_interval: int = 2,
    **method: Any,
) -> dict[str, Any]:
    """Train on the gradients of the given steps, with the loss scaled by ``scale`` if given."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    scaler = None
    if scale is not None:
        scaler = torch.amp.GradScaler("cpu", scale, growth_interval=growth_interval)
    handle = attach_evenly(ddp, **{"scheme_or_name": "topk", **method}, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.5)
    scales, residuals, velocities = [], [], []
    for step in steps:
        optimizer.zero_grad()
        poisoned = step == poisoned_step and comm.rank == 1
        loss = ddp(comm.rank, step, poison=poison if poisoned else None)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        residuals.append(residuals_of(handle, comm.rank))
        velocities.append(residuals_of(handle, comm.rank, "velocity"))
    handle.close()
    weights = {name: parameter.detach() for name, parameter in ddp.module.named_parameters()}
    return {
        "weights": weights,
        "scales": scales,
        "residuals": residuals,
        "velocities": velocities,
    }


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


METHODS: dict[str, dict[str, Any]] = {
    **{
        name: {"scheme_or_name": name}
        for name in (
            "bidirectional",
            "topk",
            "hitopk",
            "dense",
        )
    },
    "momentum": {"scheme_or_name": "topk", "momentum": 0.5},
    "momentum between nodes": {"scheme_or_name": Hierarchical(GTopK(momentum=0.5), 2)},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_scale_that_grows_changes_nothing(run_on: Any, name: str) -> None:
    program = partial(train_scaled, steps=[0, 1, 2, 3, 4], **METHODS[name])
    plain = run_on(2, partial(program, scale=None))
    scaled = run_on(2, partial(program, scale=1024.0))
    for mine, theirs in zip(scaled, plain, strict=True):
        assert mine["scales"] == [1024.0, 2048.0, 2048.0, 4096.0, 4096.0]
        assert_equal(mine["weights"], theirs["weights"])
        for kind in ("residuals", "velocities"):
            for parts, reference in zip(mine[kind], theirs[kind], strict=True):
                assert_equal(parts, reference)
        assert any(mine["velocities"][0]) == ("momentum" in name)


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("topk", "second", math.nan),
        ("momentum", "bias", math.inf),
        ("momentum", "second", -math.inf),
        ("momentum between nodes", "second", math.inf),
    ],
)
def test_inf_on_one_rank_skips_the_step_on_all(
    run_on: Any, method: str, name: str, value: float
) -> None:
    program = partial(train_scaled, **METHODS[method])
    without = run_on(2, partial(program, steps=[0, 1, 3, 4], scale=None))
    program = partial(program, growth_interval=100, scale=1024.0)
    ranks = run_on(
        2, partial(program, steps=[0, 1, 2, 3, 4], poison=(name, value), poisoned_step=2)
    )
    for mine, theirs in zip(ranks, without, strict=True):
        assert mine["scales"] == [1024.0, 1024.0, 512.0, 512.0, 512.0]
        assert_equal(mine["weights"], theirs["weights"])
        for kind in ("residuals", "velocities"):
            assert_equal(mine[kind][2], mine[kind][1])
            assert_equal(mine[kind][-1], theirs[kind][-1])


def clip(comm: Communicator, max_norm: float) -> dict[str, Any]:
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    handle = attach_evenly(ddp, "topk")
    updates, norms = [], []
    for step in range(3):
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
        updates.append(observe(ddp))
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
        norms.append(float(torch.cat(list(observe(ddp).values())).norm()))
    seen = {"updates": updates, "norms": norms, "residuals": residuals_of(handle, comm.rank)}
    handle.close()
    return seen


def test_clipping_acts_on_the_update_and_not_on_the_memory(run_on: Any) -> None:
    clipped = run_on(2, partial(clip, max_norm=8.0))
    free = run_on(2, partial(clip, max_norm=math.inf))
    for mine, theirs in zip(clipped, free, strict=True):
        assert mine["norms"] == pytest.approx([8.0] * 3, rel=1e-5)
        assert min(theirs["norms"]) > 80
        assert_equal(mine["residuals"], theirs["residuals"])
        for update, reference in zip(mine["updates"], theirs["updates"], strict=True):
            assert_equal(update, reference)
    assert clipped[0]["norms"] == clipped[1]["norms"]
