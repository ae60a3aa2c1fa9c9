"""Errors that leave a hook keep nothing alive: the model is freed without a garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.core.schemes import TopK
from sparcel.errors import CommunicationError, InputError, MismatchError, SparcelError
from sparcel.products import outer
from tests.ddp.models import MANY_BUCKETS
from tests.evenly import attach_evenly
from tests.fsdp.models import mesh_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Broke(TopK):
    """Fails on rank 1 after three steps."""

    def begin(self, gradient: Tensor, comm: Communicator, *rest: Any, **more: Any) -> Any:
        if self.steps == 3 and comm.rank == 1:
            raise LookupError("a scheme's mistake")
        return super().begin(gradient, comm, *rest, **more)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(60, 60) for _ in range(3)))


class Training:
    """A model that is trained for two steps, and then fails."""

    def __init__(self, comm: Communicator, kind: str) -> None:
        self.rank, self.model = comm.rank, layers()
        settings: dict[str, Any] = {}
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model, **MANY_BUCKETS)
        elif kind == "fsdp":
            mesh = mesh_of(comm.size, 1)
            settings["replicate"] = mesh["replicate"]
            for part in (*self.model.children(), self.model):
                fully_shard(part, mesh=mesh["shard"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if kind == "outer":
            method = outer.Method(Broke(0.1), overlap=1)
            self.handle: Any = outer.attach(self.model, self.optimizer, method, every=2)
        else:
            settings["optimizer"] = self.optimizer
            self.handle = attach_evenly(self.model, Broke(0.1), **settings)
        self.step()
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.full((2, 60), 1.0 + self.rank)).sum().backward()
        self.optimizer.step()


def fails(one: Training) -> None:
    for _ in range(8):
        one.step()


def fails_twice(one: Training) -> None:
    with suppress(LookupError, CommunicationError):
        fails(one)
    one.step()


def is_closed(one: Training) -> None:
    one.handle.close()
    one.step()


def differs(one: Training) -> None:
    one.handle.switch("topk", density=0.1 + 0.1 * one.rank)


def writes(one: Training) -> None:
    def write(part: nn.Module, *_: object) -> None:
        part.weight.detach().add_(1)

    one.model.module[0].register_forward_hook(write)
    one.step()


def adds_a_layer(one: Training) -> None:
    one.model.module.append(nn.Linear(60, 60))
    one.optimizer.add_param_group({"params": one.model.module[3].parameters()})
    one.step()


def shares_other_values(one: Training) -> None:
    one.handle.shared["0.weight"].add_(one.rank)
    fails(one)


FAILURES: list[tuple[str, Callable[[Training], None], type[Exception]]] = [
    ("ddp", fails, CommunicationError),
    ("ddp", fails_twice, RuntimeError),
    ("ddp", is_closed, CommunicationError),
    ("ddp", differs, MismatchError),
    ("ddp", writes, InputError),
    ("ddp", adds_a_layer, InputError),
    ("fsdp", fails, CommunicationError),
    ("fsdp", fails_twice, CommunicationError),
    ("fsdp", is_closed, CommunicationError),
    ("outer", fails, CommunicationError),
    ("outer", shares_other_values, MismatchError),
]


def left_by(comm: Communicator, kind: str, fail: Callable[[Training], None]) -> tuple[Any, ...]:
    """Return what is raised, and what is left once nobody holds the training and the error.

    FSDP's modules, and torch's optimisers, are freed by a garbage collection alone, also without
    sparcel. So this looks at what the calls that the error has left refer to: the training.
    """
    one = Training(comm, kind)
    watched = {"training": weakref.ref(one)}
    if kind == "ddp":
        watched["model"] = weakref.ref(one.model)
    raised: type[Exception] | None = None
    try:
        fail(one)
    except Exception as error:
        raised = type(error)
        if isinstance(error, SparcelError):  # others cannot be watched
            watched["error"] = weakref.ref(error)
    one.handle.close()
    del one
    return raised, [name for name, there in watched.items() if there() is not None]


def all_left(comm: Communicator) -> list[tuple[Any, ...]]:
    gc.collect()
    gc.disable()
    try:
        return [left_by(comm, kind, fail) for kind, fail, _ in FAILURES]
    finally:
        gc.enable()


def test_a_model_is_freed_with_the_error_that_left_its_hook(run_on: Any) -> None:
    for ends in run_on(2, all_left):
        for (kind, fail, expected), (raised, left) in zip(FAILURES, ends, strict=True):
            own = fail is fails and issubclass(raised, LookupError)  # of the rank that fails
            assert own or issubclass(raised, expected), (kind, fail, raised)
            assert left == [], (kind, fail)
