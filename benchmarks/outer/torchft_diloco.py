"""What torchft's own DiLoCo ends at and sends, beside `benchmarks.outer.training`.

Run it in each rank of an emulated cluster, a rank an island, with torchft installed:

    sparcel lab run --nodes 4 --rate 10gbit -- python -m benchmarks.outer.torchft_diloco DATA \
        --task words

Tasks, start, batches and evaluation are those of `benchmarks.outer.training`. Rank 0 serves the
lighthouse. ``bytes_sent`` is what the interface of the busiest island has sent from the first inner
step to the last outer one, with headers, acknowledgements, heartbeats and quorums.

``float32`` is torchft's DiLoCo over Gloo as it is. ``float8`` is its quantised all-reduce, which
needs a GPU (``quantised`` in the record has the error without): the arithmetic of its kernels on a
Hopper GPU, in torch, as their messages over Gloo. Each row has a scale in float32 and values in
float8, sums travel to an owner of rows and come back rounded once more. ``sparcel`` is the same
DiLoCo over `sparcel.integrations.torchft.SparseProcessGroup`, in 4 bits and one bucket.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import AllToAllOptions, TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft._torchft import LighthouseServer
from torchft.local_sgd import DiLoCo

import sparcel
from benchmarks.outer.training import ISLAND_TASKS, warmed
from benchmarks.record import RESULTS, Row, add, grid, left_of, machine, network, options
from benchmarks.training.task_training import evaluate
from benchmarks.training.tasks import batches, loss_of
from sparcel.integrations.torchft import SparseProcessGroup
from sparcel.tools.lab import link_bytes

LARGEST = 448.0
"""The largest number of float8 with 4 bits of exponent."""
TIMEOUT = timedelta(seconds=300)


class Float8(ProcessGroupGloo):
    """Sums as torchft's quantised all-reduce does, on the CPU."""

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        (tensor,), ranks = tensors, self.size()
        rows = tensor.view(len(tensor), -1)  # a vector is a column, as theirs
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % ranks))
        came = self._exchanged(_packed(padded))
        own = _packed(_unpacked(came, rows.shape[1]).view(ranks, -1, rows.shape[1]).sum(0))
        back = self._exchanged(own.repeat(ranks, 1))  # an all-gather
        tensor.copy_(_unpacked(back, rows.shape[1])[: len(rows)].view_as(tensor))
        return super().allreduce([torch.zeros(1)], opts)  # a work that has all that works have

    def _exchanged(self, messages: Tensor) -> Tensor:
        came = torch.empty_like(messages)
        self.alltoall_base(came, messages, [], [], AllToAllOptions()).wait()
        return came


def _packed(rows: Tensor) -> Tensor:
    """Return each row as the bytes of its scale and of its values, padded to fours."""
    scale = LARGEST / rows.abs().amax(1, keepdim=True)
    scale = torch.where(scale.isinf(), 1.0, scale)
    values = (rows * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    values = nn.functional.pad(values, (0, -rows.shape[1] % 4))
    return torch.cat([scale.view(torch.uint8), values], 1)


def _unpacked(messages: Tensor, columns: int) -> Tensor:
    scale = messages[:, :4].contiguous().view(torch.float32)
    return messages[:, 4 : 4 + columns].view(torch.float8_e4m3fn).float() / scale


def train(told: argparse.Namespace, job: Row, lighthouse: str) -> Row:
    """Train once; all ranks call, and the row is whole on rank 0."""
    rank, islands, seed = int(os.environ["RANK"]), job["islands"], job["seed"]
    task = replace(ISLAND_TASKS[job["task"]], steps=job["steps"])
    split = task.read(told.data / task.folder, seed)
    torch.manual_seed(seed)
    model = task.model(split)
    if job["warm"]:
        before = warmed(told.data, task.name, task.muon, job["warm"], seed)
        model.load_state_dict(before)
    optimizers = task.optimizers(model)
    outer = torch.optim.SGD(
        model.parameters(), lr=job["outer_lr"], momentum=job["momentum"], nesterov=True
    )
    sparse = SparseProcessGroup(
        sparcel.scheme("bidirectional", density=1, format="packed:4"), TIMEOUT
    )
    groups = {"float32": ProcessGroupGloo(TIMEOUT), "float8": Float8(TIMEOUT), "sparcel": sparse}
    group = groups[job["run"]]
    meeting = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=group,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=islands,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=meeting.port,
        lighthouse_addr=lighthouse,
        replica_id=f"island_{rank}",
        init_sync=False,
    )
    if group is sparse:
        sparse.follow(manager)
    start, sent = time.perf_counter(), _sent()
    with DiLoCo(
        *(manager, [model], optimizers[-1], outer),
        sync_every=job["every"],
        use_bucketization=group is sparse,
    ):
        for step, batch in enumerate(
            batches(len(split.y_train), task.batch * islands, task.steps, seed)
        ):
            part = batch.chunk(islands)[rank]
            model.zero_grad()
            loss_of(model, split.x_train[part], split.y_train[part]).backward()
            task.update(model, optimizers, step)
    sent = _sent() - sent
    assert manager.current_step() == task.steps // job["every"], "outer steps failed"
    row: Row = {
        "bytes_sent": sent,
        "outer_steps": manager.current_step(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": round(time.perf_counter() - start, 1),
    }
    if group is sparse:
        row["bytes_sent_by_scheme"] = sparse.traffic.bytes_sent
    if rank == 0:
        row |= evaluate(model, split)
        row["perplexity"] = None if row["loss"] is None else math.exp(row["loss"])
        row["quantised"] = _error_of_quantised(manager)
    manager.shutdown(wait=False)
    return row


def _error_of_quantised(manager: Any) -> str:
    """Return what torchft's quantised all-reduce raises here, if anything."""
    manager.allreduce(torch.ones(4, 4), should_quantize=True)
    error = manager.errored()
    return "" if error is None else str(error).splitlines()[0]


def _sent() -> int:
    """Return how many bytes this node of the lab has sent."""
    carried = link_bytes()
    assert carried is not None, "run it in the lab, with a rate"
    return carried.sent


def main() -> None:
    told = options(
        __doc__,
        "data",
        task={"choices": ISLAND_TASKS, "default": "words"},
        runs=["float32", "float8", "sparcel"],
        seeds=[0],
        every=30,
        steps=3000,
        warm=1000,
        outer_lr=0.7,
        momentum=0.9,
        output=RESULTS / "outer_torchft.json",
    )
    torch.set_num_threads(1)
    rank, islands = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=rank == 0, timeout=timedelta(hours=1))
    if rank == 0:
        served = LighthouseServer(bind="[::]:0", min_replicas=islands, quorum_tick_ms=20)
        store.set("lighthouse", served.address())
    lighthouse = store.get("lighthouse").decode()
    names = ("task", "every", "steps", "warm", "outer_lr", "momentum")
    settings = {"islands": islands, **{name: vars(told)[name] for name in names}}
    jobs = [settings | job for job in grid(seed=told.seeds, run=told.runs)]
    rows, left = left_of(told.output, jobs)
    origin = machine(DATA=told.data)
    for number, job in enumerate(left):
        row = train(told, job, lighthouse)
        store.set(f"{number} {rank}", str(row["bytes_sent"]))
        if rank == 0:
            each = [int(store.get(f"{number} {other}")) for other in range(islands)]
            row |= {"bytes_sent": max(each), "network": network(), "torchft": _version()}
            add(told.output, origin, rows, {**job, **row})
            print({**job, **row}, flush=True)
        store.set(f"{number} done {rank}", "")
        store.wait([f"{number} done {other}" for other in range(islands)])


def _version() -> str:
    from importlib.metadata import distributions

    return next(
        f"{one.metadata['Name']} {one.version}"
        for one in distributions()
        if one.metadata["Name"] in ("torchft", "torchft-nightly")
    )


if __name__ == "__main__":
    main()
