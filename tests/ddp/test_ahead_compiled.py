"""Step-ahead and torch.compile: the same training, compiled once, whatever is compiled when."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR

from sparcel.core.comm import Communicator
from tests.ddp.ahead import Checkpointed, Named, are, data_of, linear, loss_of, now
from tests.evenly import attach_evenly

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WAYS = ("the module before DDP", "the DDP object after attach", "the module in place")


def trained(
    comm: Communicator, model: nn.Module, way: str = "", backend: str = "", ahead: bool = True
) -> list[Named]:
    """Train with a schedule, and return the parameters after each step."""
    if way == "the module before DDP":
        ddp = DistributedDataParallel(torch.compile(model, backend=backend))
    else:
        ddp = DistributedDataParallel(model)
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    schedule = ExponentialLR(optimizer, 0.9)
    handle = attach_evenly(ddp, "topk", density=0.02, ahead=ahead)
    called = ddp
    if way == "the DDP object after attach":
        called = torch.compile(ddp, backend=backend)
    elif way == "the module in place":
        ddp.compile(backend=backend)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        data = data_of(comm.rank, step, model)
        loss_of(called(data), data).backward()
        assert all(one.is_leaf for one in ddp.parameters())
        optimizer.step()
        schedule.step()
        seen.append(now(model))
    handle.close()
    assert are(model, seen[-1])
    return seen


def side_by_side(comm: Communicator, way: str, backend: str, checkpointed: bool) -> None:
    """Compare a compiled training with a plain one, and with one that is compiled but not ahead."""
    make = partial(Checkpointed, False) if checkpointed else linear
    counts = torch._dynamo.utils.counters["stats"]
    graphs = []
    for ahead in (False, True):
        torch._dynamo.reset()
        counts.clear()
        compiled = trained(comm, make(), way, backend, ahead)
        graphs.append(counts["unique_graphs"])
        plain = trained(comm, make(), ahead=ahead)
        for mine, theirs in zip(compiled, plain, strict=True):
            for name in theirs:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-5)
    assert graphs[0] == graphs[1] > 0


@pytest.mark.parametrize(
    ("way", "checkpointed"), [(WAYS[0], True), (WAYS[1], True), (WAYS[2], False)]
)
def test_a_compiled_model_trains_alike_in_as_many_graphs(
    run_on: Any, way: str, checkpointed: bool
) -> None:
    run_on(2, side_by_side, way, "aot_eager", checkpointed)


def test_inductor_compiles_a_model_that_is_ahead(run_on: Any) -> None:
    run_on(1, side_by_side, WAYS[1], "inductor", False)
