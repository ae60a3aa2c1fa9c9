"""Types of the public names for a user's type checker; mypy checks this file, nothing runs it."""

from typing import Any, assert_type

import torch
from torch.nn.parallel import DistributedDataParallel

import sparcel


def streams(x: torch.Tensor) -> None:
    stream = sparcel.topk(x, 10)
    assert_type(stream, sparcel.SparseStream)
    assert_type(stream.indices, torch.Tensor | None)
    assert_type(stream.nnz, int)
    assert_type(stream.is_dense, bool)
    assert_type(stream.to_dense(), torch.Tensor)
    assert_type(sparcel.SparseStream.from_dense(x) + stream, sparcel.SparseStream)


def collectives(stream: sparcel.SparseStream, group: torch.distributed.ProcessGroup) -> None:
    assert_type(sparcel.all_reduce(stream), sparcel.SparseStream)
    assert_type(sparcel.all_reduce(stream, "max", group=group), sparcel.SparseStream)
    handle = sparcel.all_reduce(stream, algorithm="ring", async_op=True, format="packed")
    assert_type(handle.wait(), sparcel.SparseStream)
    assert_type(sparcel.all_gather(stream), list[sparcel.SparseStream])
    total, lost = sparcel.all_reduce(stream, format="packed:4")
    total.add(lost)  # Any
    pair = sparcel.all_reduce_topk(stream, 10, "gtopk", group, format="packed:4")
    assert_type(pair, tuple[sparcel.SparseStream, sparcel.SparseStream])
    job = sparcel.all_reduce_topk(stream, 10, async_op=True)
    assert_type(job.wait(), tuple[sparcel.SparseStream, sparcel.SparseStream])
    longest = sparcel.Op(torch.maximum, float("-inf"))
    assert_type(sparcel.all_reduce(stream, longest), sparcel.SparseStream)


def simulation() -> None:
    def rank_of(comm: sparcel.comm.Communicator) -> int:
        return comm.rank

    report = sparcel.simulate(4, rank_of)
    assert_type(report.results, list[int])
    assert_type(report.traffic[0].bytes_sent, int)


def training(model: DistributedDataParallel, gradient: torch.Tensor) -> None:
    def update(comm: sparcel.comm.Communicator) -> torch.Tensor:
        return sparcel.scheme("topk", density=0.01).step(gradient, comm)

    assert_type(sparcel.simulate(2, update).results, list[torch.Tensor])
    handle = sparcel.attach(model, "topk", density=0.01)
    state: dict[str, Any] = handle.state_dict()
    handle.load_state_dict(state)
    held: sparcel.Handle = handle
    assert_type(held.stats().last.bytes_sent, int)
    assert_type(held.stats().as_dict(), dict[str, float])
    held.switch("torus2d", ranks_per_node=8)
    held.switch("topk", densty=0.01)  # type: ignore[call-arg]
    handle.close()


def schedules(handle: sparcel.Handle, optimizer: torch.optim.Optimizer) -> None:
    schedule = sparcel.Schedule(
        sparcel.Phase(13, sparcel.scheme("hitopk"), lr=(0.4, 1.7), resolution=96, batch_size=256),
        sparcel.Phase(0.5, "torus2d", lr=lambda progress: 0.1 * (1 - progress)),
    )
    assert_type(schedule.apply(0.5, handle, optimizer), sparcel.Phase)
    assert_type(schedule.at(3).resolution, int | None)
    assert_type(schedule.lr(3), float)
    sparcel.Phase(1, "dense", 0.1)  # type: ignore[call-arg]


def settings(model: DistributedDataParallel, name: str) -> None:
    sparcel.scheme(name, density=0.01, warmup=[0.1], warmup_steps=5)
    sparcel.scheme("topk", densty=0.01)  # type: ignore[call-arg]
    sparcel.scheme("topk", density="0.01")  # type: ignore[arg-type]
    sparcel.attach(model, "topk", densty=0.01)  # type: ignore[call-arg]
    sparcel.attach(model, "oktopk", threshold=0.5)  # type: ignore[arg-type]
    sparcel.attach(model, "gtopk", density=0.01, scope="model")
    sparcel.attach(model, "gtopk", density=0.01, scope="layer")  # type: ignore[arg-type]


def named_tensors(gradients: dict[str, torch.Tensor]) -> None:
    averager = sparcel.training.Averager(gradients, sparcel.scheme("topk"))
    assert_type(averager.average(gradients), dict[str, torch.Tensor])
    assert_type(averager.handle.stats(), sparcel.training.Stats)


def sparse_updates(gradient: torch.Tensor) -> None:
    stream = sparcel.scheme("gtopk").step_stream(gradient)
    assert_type(stream, sparcel.SparseStream)
