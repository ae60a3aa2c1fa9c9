"""Training in DDP on a GPU, several processes on one card: it is that of the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.core.comm import Communicator
from tests.ddp.models import LARGE, MANY_BUCKETS
from tests.evenly import attach_evenly
from tests.gpu.cuda import GPU, delay, needs_gpu, no_waits
from tests.gpu.models import (
    SAMPLED,
    SAMPLED_BUCKETS,
    SELECTING,
    TOPK,
    Springs,
    Trained,
    assert_equal,
    assert_near,
    loss_of,
    methods,
    net,
    on_cpu,
    parameters_of,
    scheme_named,
    targets_of,
    train,
)
from tests.sampling import meeting
from tests.schemes.steps import SCHEMES

pytestmark = [*needs_gpu, pytest.mark.processes]


def side_by_side(
    comm: Communicator, method: dict[str, Any], within: float = 0, **settings: Any
) -> Trained:
    """Train on the CPU and on the GPU, compare all that came of it, and return the latter."""
    here = train(comm, "cpu", method, **settings)
    there = train(comm, GPU, method, meanwhile=delay if "wrap" in settings else None, **settings)
    for found, expected in zip(there.updates, here.updates, strict=True):
        assert_near(found, expected, within)
    assert_near(there.memory, here.memory, within)
    return there


def assert_agreed(ranks: list[Trained]) -> None:
    """Check that all ranks have the same updates, bit by bit."""
    for trained in ranks:
        for mine, first in zip(trained.updates, ranks[0].updates, strict=True):
            assert_equal(mine, first)


def by_name(comm: Communicator, name: str) -> Trained:
    method = {"scheme_or_name": scheme_named(name, comm.size)}
    return side_by_side(comm, method, wrap=MANY_BUCKETS)


@pytest.mark.parametrize(("name", "world_size"), meeting(SCHEMES, [2, 4], each=1))
def test_every_scheme_has_the_updates_of_the_cpu(run_on: Any, name: str, world_size: int) -> None:
    assert_agreed(run_on(world_size, by_name, name))


@methods
def test_three_processes_agree_and_are_close_to_the_cpu(
    run_on: Any, method: dict[str, Any]
) -> None:
    assert_agreed(run_on(3, partial(side_by_side, method=method, within=1e-5)))


@methods
@pytest.mark.parametrize("view", [False, True])
def test_buckets_that_overlap_with_a_slow_backward_pass(
    run_on: Any, method: dict[str, Any], view: bool
) -> None:
    """A bucket's exchange is queued long before the GPU has its gradients."""
    wrap = {**SAMPLED_BUCKETS, "gradient_as_bucket_view": view}
    ranks = run_on(2, partial(side_by_side, method=method, shapes=SAMPLED, wrap=wrap))
    assert_agreed(ranks)
    assert all(owed.any() for owed in ranks[0].memory.values())


@methods
def test_one_selection_over_the_model(run_on: Any, method: dict[str, Any]) -> None:
    """With one bucket it is the selection of that bucket."""
    over_model = partial(side_by_side, method={**method, "scope": "model"})
    assert_agreed(run_on(2, partial(over_model, wrap=MANY_BUCKETS)))
    whole = run_on(2, over_model)
    bucket = run_on(2, partial(side_by_side, method=method))
    for mine, other in zip(whole, bucket, strict=True):
        for update, expected in zip(mine.updates, other.updates, strict=True):
            assert_equal(update, expected)


DTYPES = {
    "float16": dict.fromkeys(("first", "bias", "second", "norm", "third"), torch.float16),
    "bfloat16": dict.fromkeys(("first", "bias", "second", "norm", "third"), torch.bfloat16),
    "mixed": {"first": torch.bfloat16, "second": torch.float64, "norm": torch.float16},
}


@methods
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=list(DTYPES))
def test_parameters_of_other_dtypes(run_on: Any, method: dict[str, Any], dtypes: Any) -> None:
    program = partial(side_by_side, method=method, dtypes=dtypes, wrap=MANY_BUCKETS)
    assert_agreed(run_on(2, program))


@methods
def test_accumulated_gradients(run_on: Any, method: dict[str, Any]) -> None:
    program = partial(side_by_side, method=method, micro_steps=3, wrap=MANY_BUCKETS)
    assert_agreed(run_on(2, program))


class Words(nn.Module):
    """An embedding with sparse gradients, and a layer; gradients are small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 6, sparse=True)
        self.layer = nn.Parameter(torch.zeros(50, 40))

    def forward(self, rank: int, step: int) -> Tensor:
        places = torch.tensor([7, 7, 3 + step, 11 * rank + 20, 90 + rank], device=self.layer.device)
        factors = torch.arange(2_000.0, device=self.layer.device).view(50, 40) % 11 - rank
        found: Tensor = self.words(places) * (4 + 4 * step)
        return found.sum() + (self.layer * factors).sum()


def learn_words(comm: Communicator, place: torch.device | str) -> list[dict[str, Tensor]]:
    ddp = DistributedDataParallel(Words().to(place), **MANY_BUCKETS)
    handle, updates = attach_evenly(ddp, "topk", density=0.05), []
    for step in range(3):
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
        words, layer = ddp.module.words.weight.grad, ddp.module.layer.grad
        assert words.is_sparse
        updates.append(on_cpu({"words": words.to_dense(), "layer": layer}))
    handle.close()
    return updates


def both_learn_words(comm: Communicator) -> None:
    for found, expected in zip(learn_words(comm, GPU), learn_words(comm, "cpu"), strict=True):
        assert_equal(found, expected)


def test_rows_of_a_sparse_embedding(run_on: Any) -> None:
    run_on(4, both_learn_words)


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}
TRAINED = {
    "as it is": (sparcel.attach, {}),
    "selecting": (attach_evenly, SELECTING),
    "topk": (attach_evenly, TOPK),
}


def learn(comm: Communicator, place: torch.device | str, how: str, by: str) -> dict[str, Tensor]:
    """Train a network for five steps; return its parameters, and the losses."""
    attach, method = TRAINED[how]
    ddp = DistributedDataParallel(net().to(place), bucket_cap_mb=0.05)
    optimizer = OPTIMIZERS[by](ddp.parameters())
    handle, losses = attach(ddp, optimizer=optimizer, **method), []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(ddp, comm.rank, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    handle.close()
    return {**parameters_of(ddp), "losses": torch.tensor(losses)}


def both_learn(comm: Communicator, how: str, by: str) -> dict[str, Tensor]:
    found = learn(comm, GPU, how, by)
    assert_near(found, learn(comm, "cpu", how, by), 1e-8)
    del found["losses"]
    return found


@pytest.mark.parametrize(("how", "by"), meeting(TRAINED, OPTIMIZERS, each=2))
def test_training_is_as_close_to_the_cpu_as_float64_allows(run_on: Any, how: str, by: str) -> None:
    first, second = run_on(2, both_learn, how, by)
    assert_equal(first, second)


def steady(comm: Communicator, method: dict[str, Any]) -> frozenset[str]:
    """Do steps that may wait but in `sparcel.core.device.read`, once DDP's buckets are final."""
    ddp = DistributedDataParallel(Springs(torch.float32).to(GPU), **MANY_BUCKETS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    handle = attach_evenly(ddp, optimizer=optimizer, **method)
    batches = [targets_of(ddp.module, comm.rank, step) for step in range(6)]

    def train_on(targets: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        ddp(targets).backward()
        optimizer.step()

    for targets in batches[:3]:
        train_on(targets)
    with no_waits():
        for targets in batches[3:]:
            train_on(targets)
    handle.close()
    return handle.sparse


@pytest.mark.parametrize("scheme", ["selecting", "topk", "gtopk", "scalecom", "dense"])
def test_no_step_waits_but_for_what_it_reads(run_on: Any, scheme: str) -> None:
    method = SELECTING if scheme == "selecting" else {"scheme_or_name": scheme}
    sparse = frozenset() if scheme == "dense" else frozenset(LARGE)
    assert run_on(2, steady, method) == [sparse] * 2
