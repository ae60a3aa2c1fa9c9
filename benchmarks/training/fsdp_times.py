"""The times and the bytes of steps and of exchanges, for `fsdp.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import sparcel
from benchmarks.clock import Clock, Timed, in_turns
from benchmarks.record import Row
from benchmarks.training.fsdp_model import (
    ALONE,
    ALONE_HALF,
    AT_10,
    HSDP,
    HSDP_HALF,
    METHODS,
    PACKED,
    TOPK,
    Method,
    Replica,
    Shape,
    Vector,
    averager_of,
    mesh_of_nodes,
    predicted,
    random_batches,
    vectors_of,
)
from sparcel.core.comm import resolve

EXCHANGED = (HSDP, HSDP_HALF, TOPK, PACKED, AT_10)
GRADIENTS = 3
"""Of how many steps gradients are exchanged by themselves, over and over."""

Run = Callable[[], object]


class DenseExchange:
    """FSDP's all-reduces of a step: one for each of its modules, one after another."""

    handle = None

    def __init__(self, method: Method, mesh: DeviceMesh) -> None:
        self._dtype, self._group = method.dtype or torch.float32, mesh["replicate"].get_group()
        self._vectors: list[Tensor] = []

    def prepare(self, gradients: Sequence[Tensor]) -> None:
        self._vectors = [gradient.to(self._dtype, copy=True) for gradient in gradients]

    def run(self) -> None:
        for vector in self._vectors:
            dist.all_reduce(vector, group=self._group)


class SparseExchange:
    """The averager's exchange of a step."""

    def __init__(self, method: Method, mesh: DeviceMesh, vectors: Sequence[Vector]) -> None:
        self._averager = averager_of(vectors, method, mesh)
        self._places = [vector.places for vector in vectors]
        self.handle = self._averager.handle
        self._vectors: list[Tensor] = []

    def prepare(self, gradients: Sequence[Tensor]) -> None:
        self._vectors = [gradient.clone() for gradient in gradients]

    def run(self) -> None:
        for vector, places in zip(self._vectors, self._places, strict=True):
            self._averager.queue(vector, places)
        self._averager.finish()


def all_rows(shape: Shape, shapes: Sequence[Shape], rounds: int, repeats: int) -> Iterator[Row]:
    """Yield rows of steps of a model of ``shape``, and of exchanges of models of ``shapes``."""
    dist.init_process_group("gloo")
    mesh, clock = mesh_of_nodes(), Clock(resolve(None))
    yield from _steps(clock, mesh, shape, rounds, repeats)
    for one in shapes:
        yield from _exchanges(clock, mesh, one, rounds, repeats)
    clock.comm.close()
    dist.destroy_process_group()


def _steps(
    clock: Clock, mesh: DeviceMesh, shape: Shape, rounds: int, repeats: int
) -> Iterator[Row]:
    replicas = {label: Replica(method, mesh, shape) for label, method in METHODS.items()}
    batches = random_batches(1)
    jobs = {label: partial(_next_step, replica, batches) for label, replica in replicas.items()}
    found = _timed(clock, jobs, rounds, repeats)
    vectors = vectors_of(replicas[ALONE].model)
    floors = {METHODS[label].dtype: found[label]["all_ms"] for label in (ALONE, ALONE_HALF)}
    for label, replica in replicas.items():
        both = zip(found[label]["all_ms"], floors[replica.method.dtype], strict=True)
        yield {
            "what": "step",
            "method": label,
            "parameters": replica.parameters,
            "added_ms": median(step - floor for step, floor in both),
            **found[label],
            **_bytes(vectors, replica.method, mesh, replica.handle),
        }
        replica.close()


def _next_step(replica: Replica, batches: Iterator[tuple[Tensor, Tensor]]) -> Run:
    return partial(replica.step, *next(batches))


def _exchanges(
    clock: Clock, mesh: DeviceMesh, shape: Shape, rounds: int, repeats: int
) -> Iterator[Row]:
    replica = Replica(METHODS[ALONE], mesh, shape)
    vectors, batches, gradients = vectors_of(replica.model), random_batches(1), []
    for _ in range(GRADIENTS):
        replica.backward(*next(batches))
        gradients.append([vector.gradient() for vector in vectors])
        replica.optimizer.zero_grad()
    exchanges = {
        label: DenseExchange(METHODS[label], mesh)
        if METHODS[label].is_hsdp
        else SparseExchange(METHODS[label], mesh, vectors)
        for label in EXCHANGED
    }
    jobs = {
        label: partial(_next_exchange, one, cycle(gradients)) for label, one in exchanges.items()
    }
    found = _timed(clock, jobs, rounds, repeats)
    for label, exchange in exchanges.items():
        yield {
            "what": "exchange",
            "method": label,
            "parameters": replica.parameters,
            "speedup": found[HSDP_HALF]["ms"] / found[label]["ms"],
            **found[label],
            **_bytes(vectors, METHODS[label], mesh, exchange.handle),
        }
        if exchange.handle is not None:
            exchange.handle.close()


def _next_exchange(
    exchange: DenseExchange | SparseExchange, gradients: Iterator[Sequence[Tensor]]
) -> Run:
    exchange.prepare(next(gradients))
    return exchange.run


def _timed(
    clock: Clock, jobs: Mapping[str, Callable[[], Run]], rounds: int, repeats: int
) -> dict[str, Row]:
    """Time what each job returns, in turns, after one that warms up."""
    calls = {label: lambda job=job: clock.timed(job()) for label, job in jobs.items()}
    found: dict[str, list[Timed]] = in_turns(calls, rounds, repeats=repeats)
    return {
        label: {
            "ms": median(one.ms for one in timed),
            "cpu_ms": median(one.cpu_ms for one in timed),
            "link_bytes": median(one.link_bytes for one in timed),
            "all_ms": [one.ms for one in timed],
        }
        for label, timed in found.items()
    }


def _bytes(
    vectors: Sequence[Vector], method: Method, mesh: DeviceMesh, handle: sparcel.Handle | None
) -> Row:
    """Return what the busiest node sent in the last step, and what it was to send; all call."""
    told, exact = predicted(vectors, method, mesh)
    if handle is None:
        return {"predicted_bytes": _of_busiest_node(told), "exact": exact}
    sent = handle.stats().last.bytes_sent
    return {
        "predicted_bytes": _of_busiest_node(told),
        "exact": exact,
        "sent_bytes": _of_busiest_node(sent),
        "as_predicted": all(_gathered(sent == told)),
    }


def _of_busiest_node(nbytes: int) -> int:
    here, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), _gathered(nbytes)
    return max(sum(ranks[start : start + here]) for start in range(0, len(ranks), here))


def _gathered(figure: Any) -> list[Any]:
    figures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(figures, figure)
    return figures
