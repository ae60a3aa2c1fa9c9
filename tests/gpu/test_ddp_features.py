"""What torch has for training on a GPU, with gradients that sparcel exchanges."""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.core.comm import Communicator
from sparcel.core.optim import LAMB, LARS
from sparcel.core.training import Averager
from sparcel.errors import CommunicationError, InputError
from tests.ddp.models import LARGE, MANY_BUCKETS, residuals_of
from tests.evenly import attach_evenly
from tests.gpu.cuda import GPU, needs_gpu
from tests.gpu.models import (
    Springs,
    assert_equal,
    assert_near,
    loss_of,
    methods,
    net,
    on_cpu,
    parameters_of,
    targets_of,
)
from tests.workers import run_apart

pytestmark = [*needs_gpu, pytest.mark.processes]


def in_half(
    comm: Communicator, method: dict[str, Any], dtype: torch.dtype, broken: int | None
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Train under autocast, with an infinite loss on rank 1 in one step.

    Returns the scale and the parameters after each step, and the memory at the end.
    """
    ddp = DistributedDataParallel(net(torch.float32).to(GPU), bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(GPU.type, 1024.0, growth_interval=100)
    handle = attach_evenly(ddp, scaler=scaler, optimizer=optimizer, **method)
    scales, seen = [], []
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast(GPU.type, dtype):
            loss = loss_of(ddp, comm.rank, step)
        if step == broken and comm.rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        seen.append(parameters_of(ddp))
    memory = on_cpu(residuals_of(handle, comm.rank))
    void = handle.stats().void_steps
    handle.close()
    assert void == (broken is not None)
    return scales, seen, memory


@methods
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_and_a_step_that_all_ranks_skip(
    run_on: Any, method: dict[str, Any], dtype: torch.dtype
) -> None:
    first, second = run_on(2, in_half, method, dtype, 2)
    for scales, seen, memory in (first, second):
        assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
        assert_equal(seen[2], seen[1])
        assert not torch.equal(seen[3]["0.weight"], seen[2]["0.weight"])
        assert all(owed.isfinite().all() for owed in memory.values())
    for mine, theirs in zip(first[1], second[1], strict=True):
        assert_equal(mine, theirs)


def compiled(comm: Communicator, compiling: bool) -> dict[str, Tensor]:
    """Train a network whose DDP object is compiled after sparcel was attached, or is not."""
    torch._dynamo.reset()
    ddp = DistributedDataParallel(net().to(GPU))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    handle = attach_evenly(ddp, "topk", density=0.05, optimizer=optimizer)
    called = torch.compile(ddp) if compiling else ddp
    for step in range(4):
        optimizer.zero_grad()
        loss_of(called, comm.rank, step).backward()
        optimizer.step()
    handle.close()
    return parameters_of(ddp)


def both_ways(comm: Communicator) -> dict[str, Tensor]:
    found = compiled(comm, True)
    assert_near(found, compiled(comm, False), 1e-8)
    return found


def test_a_compiled_model_trains_as_one_that_is_not(run_on: Any) -> None:
    first, second = run_on(2, both_ways)
    assert_equal(first, second)


def captured(comm: Communicator) -> list[str]:
    """Try to capture exchanges in CUDA graphs; return what was said."""
    vector = torch.ones(2_000, device=GPU)
    averager = Averager({"weight": vector}, sparcel.scheme("topk"), group=comm)
    stream = sparcel.SparseStream.unchecked(None, vector, vector.numel())
    calls = [
        lambda: averager.average({"weight": vector}),
        lambda: sparcel.scheme("topk").step(vector, comm),
        lambda: sparcel.all_reduce(stream, group=comm),
        lambda: sparcel.all_reduce(stream, group=comm, async_op=True).wait(),
    ]
    said = []
    for call in calls:
        call()  # what is only refused in a graph
        torch.cuda.synchronize()
        with pytest.raises(InputError) as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
        said.append(str(raised.value))
        assert float(vector.sum()) == 2_000
    averager.handle.close()
    return said


def captured_step(comm: Communicator) -> list[str]:
    """Try to capture a training step as torch's notes on CUDA graphs do it with DDP."""
    side = torch.cuda.Stream(GPU)
    with torch.cuda.stream(side):
        ddp = DistributedDataParallel(Springs(torch.float32).to(GPU), **MANY_BUCKETS)
        handle = attach_evenly(ddp, "topk", ahead=False)
        targets = targets_of(ddp.module, comm.rank, 0)
        for _ in range(12):  # in the first ten steps DDP measures times, which waits
            ddp.zero_grad()
            ddp(targets).backward()
        ddp.zero_grad()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(InputError) as raised, torch.cuda.graph(graph, stream=side):
        ddp(targets).backward()
    handle.close()
    return [str(raised.value)]


@pytest.mark.parametrize("attempt", [captured, captured_step])
def test_a_cuda_graph_is_refused_in_a_sentence(run_on: Any, attempt: Any) -> None:
    for said in run_on(2, attempt):
        assert all("cannot be captured in a CUDA graph; capture the" in one for one in said)
        assert not any("\n" in one for one in said)


LAYER_WISE = {
    "LARS": partial(LARS, lr=3.0, momentum=0.9, weight_decay=0.01),
    "LAMB": partial(LAMB, lr=0.01, weight_decay=0.01),
}


def layer_wise(
    comm: Communicator, place: torch.device | str, by: str, parallel: bool
) -> dict[str, Tensor]:
    """Train a network for some steps, the third one void."""
    ddp = DistributedDataParallel(net().to(place))
    optimizer = LAYER_WISE[by](ddp.parameters(), parallel=parallel)
    handle = attach_evenly(ddp, "topk", density=0.05, optimizer=optimizer)
    for step in range(5):
        before = parameters_of(ddp)
        optimizer.zero_grad()
        (loss_of(ddp, comm.rank, step) * (math.nan if step == 2 and comm.rank else 1)).backward()
        optimizer.step()
        after = parameters_of(ddp)
        assert all(torch.equal(before[name], after[name]) for name in after) == (step == 2)
    handle.close()
    return after


def both_layer_wise(comm: Communicator, by: str, parallel: bool) -> dict[str, Tensor]:
    found = layer_wise(comm, GPU, by, parallel)
    assert_near(found, layer_wise(comm, "cpu", by, parallel), 1e-8)
    return found


@pytest.mark.parametrize("by", LAYER_WISE)
@pytest.mark.parametrize("parallel", [False, True])
def test_layer_wise_optimisers_train_as_on_the_cpu(run_on: Any, by: str, parallel: bool) -> None:
    first, second = run_on(2, both_layer_wise, by, parallel)
    assert_equal(first, second)


def bereaved(comm: Communicator) -> tuple[str, bool]:
    """Lose rank 1 in the third backward pass; return the error, and whether memory stayed."""
    ddp = DistributedDataParallel(Springs(torch.float32).to(GPU), **MANY_BUCKETS)
    handle = attach_evenly(ddp, "topk")
    for step in range(2):
        ddp.zero_grad()
        ddp(targets_of(ddp.module, comm.rank, step)).backward()
    before = residuals_of(handle, comm.rank)
    if comm.rank == 1:
        own = ddp.module.get_parameter("second")
        own.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(CommunicationError) as raised:
        ddp(targets_of(ddp.module, comm.rank, 2)).backward()
    after = residuals_of(handle, comm.rank)
    return str(raised.value), all(torch.equal(before[name], after[name]) for name in LARGE)


def test_survivors_of_a_killed_rank_raise_and_keep_their_memory() -> None:
    outcomes = run_apart(3, bereaved, timeout=60)
    assert outcomes.pop(1).died == -signal.SIGKILL
    for outcome in outcomes:
        assert outcome.error is None
        said, kept = outcome.result
        assert "rank 1" in said
        assert kept
