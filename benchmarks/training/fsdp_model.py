"""A transformer that `fully_shard` shards, and what averages it over replicas, for `fsdp.py`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import sparcel
from benchmarks.training.models import Words
from benchmarks.training.tasks import loss_of
from sparcel.core import auto
from sparcel.core.comm import ring_bytes
from sparcel.core.cost import STEPS, Problem, count, default_rates
from sparcel.core.cost.formulas import Terms, fastest_sum, gather
from sparcel.core.cost.predict import Formula
from sparcel.core.memory import Range
from sparcel.core.schemes import DEFAULT, SPARSER, Settings
from sparcel.core.schemes.density import count_for
from sparcel.core.training import Averager, Shard, stays_dense

LETTERS, LENGTH = 65, 48
LR = 1e-3

Shape = tuple[int, int]
"""The width of a model, and its layers."""


@dataclass(frozen=True)
class Method:
    """What reduces the gradients.

    Attributes
    ----------
    is_hsdp
        Whether FSDP itself averages over the replicas.
    dtype
        The dtype in which FSDP reduces; None for that of the gradients, float32.
    scheme, settings
        What sparcel averages over the replicas with, if it does.
    ahead
        Whether sparcel's gradients are those of step-ahead.
    """

    is_hsdp: bool = False
    dtype: torch.dtype | None = None
    scheme: str | None = None
    settings: Settings = field(default_factory=Settings)
    ahead: bool = True

    def make(self) -> sparcel.schemes.Scheme:
        return sparcel.scheme(self.scheme, **self.settings)


HALF = torch.bfloat16
ALONE, ALONE_HALF, HSDP, HSDP_HALF, TOPK, PACKED, AT_10 = (
    "no exchange",
    "no exchange, bfloat16",
    "HSDP float32",
    "HSDP bfloat16",
    "topk 1 %",
    "topk 1 %, packed:4",
    "sparcel, 10 %",
)
METHODS = {
    ALONE: Method(),
    ALONE_HALF: Method(dtype=HALF),
    HSDP: Method(is_hsdp=True),
    HSDP_HALF: Method(is_hsdp=True, dtype=HALF),
    TOPK: Method(scheme="topk", settings={"density": 0.01}),
    f"{TOPK}, bfloat16": Method(dtype=HALF, scheme="topk", settings={"density": 0.01}),
    PACKED: Method(scheme="topk", settings={"density": 0.01, "format": "packed:4"}),
    AT_10: Method(scheme=DEFAULT, settings=SPARSER),
}


def mesh_of_nodes() -> DeviceMesh:
    """Return the mesh whose nodes are the replicas, and whose ranks of a node the shards."""
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = dist.get_world_size() // here
    return init_device_mesh("cpu", (nodes, here), mesh_dim_names=("replicate", "shard"))


def random_batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of this rank, of random letters."""
    own = torch.Generator().manual_seed(dist.get_rank())
    while True:
        x, y = torch.randint(LETTERS, (2, size, LENGTH), generator=own)
        yield x, y


class Replica:
    """A model, sharded in its node and averaged over the nodes by a method, with its optimiser.

    With ``reshard`` a pass frees parameters of other ranks as soon as it has used them.
    """

    def __init__(
        self,
        method: Method,
        mesh: DeviceMesh,
        shape: Shape,
        seed: int = 0,
        frontload: bool = False,
        reshard: bool = True,
    ) -> None:
        torch.manual_seed(seed)
        self.method, self.mesh = method, mesh
        self.model: Any = Words(LETTERS, LENGTH, *shape)
        policy = MixedPrecisionPolicy(reduce_dtype=method.dtype)
        for module in (*self.model.layers.layers, self.model):
            ranks = mesh if method.is_hsdp else mesh["shard"]
            fully_shard(module, mesh=ranks, mp_policy=policy, reshard_after_forward=reshard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        self.handle: sparcel.Handle | None = None
        if method.scheme is not None:
            self.handle = sparcel.attach(
                self.model,
                method.make(),
                replicate=mesh["replicate"],
                optimizer=self.optimizer,
                frontload=frontload,
                ahead=method.ahead,
            )

    @property
    def parameters(self) -> int:
        return sum(one.numel() for one in self.model.parameters())

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Do both passes, and return the loss of this rank's samples."""
        loss = loss_of(self.model, x, y)
        loss.backward()
        return loss.detach()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Do a step of training, and return the loss of this rank's samples."""
        loss = self.backward(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


@dataclass(frozen=True)
class Vector:
    """The gradients that FSDP reduces together, as this rank has them: parameters by name.

    FSDP lays out the shards of a module one after another, each in as much room as the largest
    shard of its parameter takes.
    """

    parameters: Mapping[str, DTensor]

    @property
    def places(self) -> dict[str, Range]:
        found, start = {}, 0
        for name, whole in self.parameters.items():
            found[name] = start, start + whole.to_local().numel()
            start += -(-whole.shape[0] // whole.device_mesh.size()) * math.prod(whole.shape[1:])
        return found

    @property
    def size(self) -> int:
        return max(stop for _, stop in self.places.values())

    @property
    def small(self) -> int:
        """How many elements belong to tensors that stay dense."""
        return sum(
            stop - start
            for name, (start, stop) in self.places.items()
            if stays_dense(name, self.parameters[name])
        )

    def gradient(self) -> Tensor:
        """Return a copy of the gradients, flat."""
        vector = torch.zeros(self.size)
        for name, (start, stop) in self.places.items():
            gradient: Any = self.parameters[name].grad
            vector[start:stop] = gradient.to_local().flatten()
        return vector


def vectors_of(model: nn.Module) -> list[Vector]:
    """Return the vectors of a sharded model, in the order in which a backward pass reduces them."""
    by_module: dict[str, dict[str, DTensor]] = {
        f"{path}." if path else "": {}
        for path, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        module = max((module for module in by_module if name.startswith(module)), key=len)
        by_module[module][name] = parameter
    return [Vector(parameters) for parameters in reversed(by_module.values())]


def averager_of(vectors: Sequence[Vector], method: Method, mesh: DeviceMesh) -> Averager:
    """Return what `sparcel.attach` would exchange these vectors with."""
    whole = {name: one for vector in vectors for name, one in vector.parameters.items()}
    return Averager(
        {name: one.to_local().detach() for name, one in whole.items()},
        method.make(),
        policy=lambda name, _: stays_dense(name, whole[name]),
        frontload=False,
        shard=Shard(mesh["shard"].get_local_rank(), whole),
    )


def predicted(vectors: Sequence[Vector], method: Method, mesh: DeviceMesh) -> tuple[int, bool]:
    """Return the bytes that this rank is to send in a step, and whether that is exact.

    It is exact where it does not depend on which coordinates the ranks select, and how many. Of
    FSDP itself it is what a ring sends, which Gloo need not take.
    """
    ranks = mesh["replicate"].size()
    if method.is_hsdp:
        itemsize = (method.dtype or torch.float32).itemsize
        return sum(ring_bytes(vector.size * itemsize, ranks) for vector in vectors), False
    if method.scheme is None:
        return 0, True
    made: Any = method.make()
    problems = [
        Problem(vector.size, count_for(made.density, vector.size), ranks, format=made.format)
        for vector in vectors
    ]
    formula, small = STEPS[method.scheme], sum(vector.small for vector in vectors)
    selected = _sent(formula, problems)
    alike = _sent(formula, [replace(problem, spread=problem.k) for problem in problems])
    whole = _sent(_whole, [Problem(small, small, ranks)])
    everyone = Problem(1, 1, dist.get_world_size())
    exact = selected == alike and method.scheme != DEFAULT  # whose thresholds are of a sample
    return round(selected + whole + _sent(_agreement, [everyone])), exact


def _sent(formula: Formula, problems: Sequence[Problem]) -> float:
    return sum(count(formula, problem).bytes_sent for problem in problems)


def _whole(problem: Problem) -> Terms:
    """Return the terms of `sparcel.core.auto.sum_whole`."""
    if problem.ranks > 2 and auto.fastest(problem, default_rates()) != "allgather":
        return fastest_sum(problem)
    return gather(problem.ranks, problem.size * problem.itemsize)


def _agreement(problem: Problem) -> Terms:
    """Return the terms in which all ranks tell one another whether a step was finite."""
    return gather(problem.ranks, 8)
