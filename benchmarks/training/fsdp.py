"""Models that FSDP2 shards in nodes and that are averaged over nodes, by FSDP and by sparcel.

Run it in each rank of an emulated cluster. Its nodes are the replicas, the ranks of a node the
shards. Steps, exchanges, and bytes between nodes:

    sparcel lab run --nodes 2 --ranks-per-node 4 --rate 1gbit -- \
        python -m benchmarks.training.fsdp --output benchmarks/results/fsdp_2x4.json
    sparcel lab run --nodes 4 --ranks-per-node 2 --rate 1gbit -- \
        python -m benchmarks.training.fsdp --output benchmarks/results/fsdp_4x2.json

Also at 100 Mbit/s (`--rate 100mbit --rounds 2`, fsdp_2x4_100mbit.json, fsdp_4x2_100mbit.json). What
a rank holds, and the losses of 200 steps on the text in ``DATA/tinyshakespeare``:

    sparcel lab run --nodes 2 --ranks-per-node 4 --rate none -- \
        python -m benchmarks.training.fsdp --memory --output benchmarks/results/fsdp_memory.json
    sparcel lab run --nodes 2 --ranks-per-node 2 --rate none -- \
        python -m benchmarks.training.fsdp --train DATA \
        --output benchmarks/results/fsdp_training.json

**Steps and exchanges.** All methods take turns. A time is the slowest rank's after a barrier, and
``ms`` the median of all; ``cpu_ms`` is the processor time of an average rank. A step is both
passes, the exchange and the optimiser; ``added_ms`` is what it takes longer than one of the same
turn without exchange between nodes. With "bfloat16" FSDP reduces in that dtype, in the nodes too.
An exchange is what is done with a step's gradients once they are reduced in the nodes, by itself:
FSDP's all-reduces, or the whole work of sparcel. ``speedup`` compares it with FSDP's in bfloat16.

``sent_bytes`` are what the ranks of the busiest node sent in a step, as `Handle.stats` counts them;
``predicted_bytes`` what the formula of the scheme says. They are ``exact`` where it does not matter
which coordinates the ranks select, and otherwise expected of independent selections; of FSDP they
are what rings send. ``link_bytes`` crossed the busiest link, headers and a barrier included.

**Memory.** ``held_bytes`` are all tensors of a rank between two steps, ``resident_bytes`` its
process at that time, after free memory was given back, and ``peak_bytes`` the most in three steps,
each the mean over ranks. The allocator maps larger tensors one by one, so none that is freed stays.
Each method has processes of its own. ``two_vectors_bytes`` and ``bucket_bytes`` are two float32
vectors of the shards' size, and one of the largest module's shard.

**Training.** ``loss`` is the mean of the last 20 steps over all ranks, ``held_out`` that of text
that was held out. To save time, parameters stay whole between the two passes of a step. Trainings
that the output has are not repeated.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import CDLL
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import sparcel
from benchmarks.clock import Clock, Timed, alone, gathered, gloo, in_turns, process_bytes, resident
from benchmarks.record import Row, grid, network, options, report, run_here
from benchmarks.training import fsdp_model as sharded
from benchmarks.training.fsdp_model import ALONE, AT_10, HSDP, HSDP_HALF, METHODS, TOPK
from benchmarks.training.tasks import TASKS, batches, loss_of
from sparcel.core.comm import resolve

SHAPE, LARGER, LARGEST = (384, 3), (640, 5), (1024, 5)
"""Models of 5.4, 25 and 63 million parameters: width and layers."""


IN_MEMORY = (ALONE, HSDP_HALF, TOPK, AT_10)
TRAINED = (HSDP, HSDP_HALF, TOPK, AT_10)
SEEDS = (0, 1, 2)
LAST = 20
WINDOWS = 512
"""Of how many steps the loss is a training's, and how many samples are held out."""


def remembered(shape: sharded.Shape) -> Iterator[Row]:
    """Yield what ranks hold with each method, in processes that end with it."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    server = _store(is_master=True) if os.environ["RANK"] == "0" else None
    yield from (alone(_held, label, shape) for label in IN_MEMORY)
    del server


def _store(is_master: bool) -> dist.TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False)


def _held(label: str, shape: sharded.Shape) -> Row:
    """Return what ranks hold with a method, on average; all ranks call."""
    torch.set_num_threads(1)
    store = dist.PrefixStore(label, _store(is_master=False))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    replica = sharded.Replica(METHODS[label], sharded.mesh_of_nodes(), shape)
    batch = sharded.random_batches(1)
    for _ in range(3):
        replica.step(*next(batch))
    held = _bytes_of_tensors()
    CDLL(None).malloc_trim(0)
    figures = {"held_bytes": held, "resident_bytes": resident()}  # from which the peak begins
    for _ in range(3):
        replica.step(*next(batch))
    figures["peak_bytes"] = process_bytes("VmHWM")
    if replica.handle is not None:
        sizes = [vector.size for vector in sharded.vectors_of(replica.model)]
        figures |= {"two_vectors_bytes": 8 * sum(sizes), "bucket_bytes": 4 * max(sizes)}
    total = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(total)
    replica.close()
    dist.destroy_process_group()
    means = (total / ranks).tolist()
    return {"what": "memory", "method": label, **dict(zip(figures, means, strict=True))}


def _bytes_of_tensors() -> int:
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def trained(data: Path, what: str, method: str, seed: int, steps: int) -> Row:
    """Train with a method, and return its losses; all ranks call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task = replace(TASKS["characters"], steps=steps, batch=ranks, lr=sharded.LR)
    split = task.read(data / task.folder, seed)
    mesh = sharded.mesh_of_nodes()
    replica = sharded.Replica(METHODS[method], mesh, SHAPE, seed, frontload=True, reshard=False)
    losses, start = [], perf_counter()
    for step, batch in enumerate(batches(len(split.y_train), task.batch, task.steps, seed)):
        part = batch.chunk(ranks)[rank]
        for group in replica.optimizer.param_groups:
            group["lr"] = task.lr_at(step)
        losses.append(replica.step(split.x_train[part], split.y_train[part]))
    seconds = perf_counter() - start
    part = torch.arange(WINDOWS).chunk(ranks)[rank]
    replica.model.eval()
    with torch.no_grad():
        losses.append(loss_of(replica.model, split.x_test[part], split.y_test[part]))
    means = torch.stack(losses) / ranks
    dist.all_reduce(means)
    *by_step, held_out = means.tolist()
    compression = None if replica.handle is None else replica.handle.stats().compression
    replica.close()
    return {
        "loss": mean(by_step[-LAST:]),
        "held_out": held_out,
        "seconds": seconds,
        "compression": compression,
        "losses": [round(loss, 4) for loss in by_step],
    }


EXCHANGED = (HSDP, HSDP_HALF, TOPK, sharded.PACKED, AT_10)
GRADIENTS = 3
"""Of how many steps gradients are exchanged by themselves, over and over."""

Run = Callable[[], object]


class Exchange:
    """FSDP's all-reduces of a step, one after another, or the averager's exchange."""

    def __init__(
        self, method: sharded.Method, mesh: DeviceMesh, vectors: Sequence[sharded.Vector]
    ) -> None:
        self._dtype, self._group = method.dtype or torch.float32, mesh["replicate"].get_group()
        self._averager = None if method.is_hsdp else sharded.averager_of(vectors, method, mesh)
        self.handle = None if self._averager is None else self._averager.handle
        self._places = [vector.places for vector in vectors]
        self._vectors: list[Tensor] = []

    def prepare(self, gradients: Sequence[Tensor]) -> None:
        self._vectors = [gradient.to(self._dtype, copy=True) for gradient in gradients]

    def run(self) -> None:
        if self._averager is None:
            for vector in self._vectors:
                dist.all_reduce(vector, group=self._group)
            return
        for vector, places in zip(self._vectors, self._places, strict=True):
            self._averager.queue(vector, places)
        self._averager.finish()


def timed_rows(rounds: int, repeats: int) -> Iterator[Row]:
    """Yield rows of steps of a model, and of exchanges of models; all ranks call."""
    mesh, clock = sharded.mesh_of_nodes(), Clock(resolve(None))
    yield from _steps(clock, mesh, SHAPE, rounds, repeats)
    for one in (SHAPE, LARGER):
        yield from _exchanges(clock, mesh, one, rounds, repeats)
    clock.comm.close()


def _steps(
    clock: Clock, mesh: DeviceMesh, shape: sharded.Shape, rounds: int, repeats: int
) -> Iterator[Row]:
    replicas = {label: sharded.Replica(method, mesh, shape) for label, method in METHODS.items()}
    batches = sharded.random_batches(1)
    jobs = {label: partial(_next_step, replica, batches) for label, replica in replicas.items()}
    found = _timed(clock, jobs, rounds, repeats)
    vectors = sharded.vectors_of(replicas[ALONE].model)
    floors = {METHODS[label].dtype: found[label]["all_ms"] for label in (ALONE, sharded.ALONE_HALF)}
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


def _next_step(replica: sharded.Replica, batches: Iterator[tuple[Tensor, Tensor]]) -> Run:
    return partial(replica.step, *next(batches))


def _exchanges(
    clock: Clock, mesh: DeviceMesh, shape: sharded.Shape, rounds: int, repeats: int
) -> Iterator[Row]:
    replica = sharded.Replica(METHODS[ALONE], mesh, shape)
    vectors, batches, gradients = sharded.vectors_of(replica.model), sharded.random_batches(1), []
    for _ in range(GRADIENTS):
        replica.backward(*next(batches))
        gradients.append([vector.gradient() for vector in vectors])
        replica.optimizer.zero_grad()
    exchanges = {label: Exchange(METHODS[label], mesh, vectors) for label in EXCHANGED}
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


def _next_exchange(exchange: Exchange, gradients: Iterator[Sequence[Tensor]]) -> Run:
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
    vectors: Sequence[sharded.Vector],
    method: sharded.Method,
    mesh: DeviceMesh,
    handle: sparcel.Handle | None,
) -> Row:
    """Return what the busiest node sent in the last step, and what it was to send; all call."""
    told, exact = sharded.predicted(vectors, method, mesh)
    if handle is None:
        return {"predicted_bytes": _of_busiest_node(told), "exact": exact}
    sent = handle.stats().last.bytes_sent
    return {
        "predicted_bytes": _of_busiest_node(told),
        "exact": exact,
        "sent_bytes": _of_busiest_node(sent),
        "as_predicted": all(gathered(sent == told)),
    }


def _of_busiest_node(nbytes: int) -> int:
    here, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), gathered(nbytes)
    return max(sum(ranks[start : start + here]) for start in range(0, len(ranks), here))


def main() -> None:
    told = options(__doc__, rounds=5, repeats=3, memory=False, train=Path, steps=200, output=Path)
    if told.memory:
        rank, rows = int(os.environ["RANK"]), [*remembered(LARGEST)]
    else:
        with gloo() as rank:
            if told.train is not None:
                jobs = grid(what=["training"], seed=SEEDS, method=TRAINED, steps=[told.steps])
                work = partial(trained, told.train)
                run_here(told.output, work, jobs, rank, dist.barrier, network=network())
                return
            rows = [*timed_rows(told.rounds, told.repeats)]
    if rank == 0:
        report(told.output, rows, network=network())


if __name__ == "__main__":
    main()
