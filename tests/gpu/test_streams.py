"""Collectives of streams on a GPU: results, the order of work, and messages that are corrupt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import sparcel
from sparcel import SparseStream
from sparcel.core import device
from sparcel.core.comm import Communicator, resolve
from sparcel.core.comm.staged import Staged
from sparcel.errors import CommunicationError, FormatError
from tests.gpu.cuda import GPU, delay, moved, needs_gpu, no_waits, on_host
from tests.sampling import meeting
from tests.strategies import DTYPES, case_of, same_stream

pytestmark = [*needs_gpu, pytest.mark.processes]

SIZE, COUNT, TURNS = 40_000, 2_000, 4


def results_of(stream: SparseStream, root: bool, formats: list[str]) -> list[SparseStream]:
    """Return what the collectives make of a stream, on the CPU."""
    found = []
    for format in formats:
        found.append(sparcel.all_reduce(stream, format=format))
        found += sparcel.all_gather(stream, format=format)
        found.append(sparcel.reduce_scatter(stream, format=format))
        found.append(sparcel.broadcast(stream if root else None, 1, format=format))
    found.append(sparcel.all_reduce(stream, "max"))
    found += [
        sparcel.all_reduce(stream, algorithm=name)
        for name in ("recursive_doubling", "split_allgather", "ring")
    ]
    return list(map(on_host, found))


def compare(
    comm: Communicator, layout: str, dtype: torch.dtype, width: int | None
) -> list[SparseStream]:
    """Check that a GPU's streams have the results of the CPU's, and return them.

    Values are integers, whose sums have the same bits in any order.
    """
    case = case_of(layout, comm.size, SIZE, dtype, width=width, count=SIZE // 50)
    stream, root = case.streams[comm.rank], comm.rank == 1
    expected = results_of(stream, root, ["raw", "packed"])
    found = results_of(moved(stream, GPU), root, ["raw", "packed"])
    assert all(map(same_stream, found, expected))
    return [found[0], found[-1]]


KINDS = [(dtype, width) for width in (None, 3) for dtype in DTYPES]
WAYS = list(product([2, 4], ["random", "dense", "uneven"]))


@pytest.mark.parametrize(
    ("world_size", "layout", "dtype", "width"),
    [(*way, *kind) for kind, way in meeting(KINDS, WAYS, each=1)],
)
def test_streams_of_all_kinds_have_the_results_of_the_cpu(
    run_on: Any, world_size: int, layout: str, dtype: torch.dtype, width: int | None
) -> None:
    first, *others = run_on(world_size, compare, layout, dtype, width)
    for other in others:
        assert all(map(same_stream, first, other))


def late(rank: int, turn: int, base: Tensor) -> SparseStream:
    """Return a stream whose values the current stream of the GPU will compute some time later."""
    values = torch.full_like(base, float("nan"))
    delay()
    values.copy_(base).add_(rank + turn)
    indices = torch.arange(base.numel(), dtype=torch.int32, device=base.device) * 3 + rank
    return SparseStream.unchecked(indices, values, SIZE)


def overlapping(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
    """Reduce streams from another stream than the default, several at once; return the sums.

    The tensors that are given, and those that come, are let go of at once: their memory must not
    be given to others while the GPU is behind.
    """
    base, side = torch.arange(COUNT, device=GPU).float(), torch.cuda.Stream(GPU)
    warm = torch.arange(COUNT, dtype=torch.int32, device=GPU)
    # Kernels are compiled, and the ranks connected.
    sparcel.all_reduce(SparseStream.unchecked(warm, base, SIZE)).to_dense()
    side.wait_stream(torch.cuda.current_stream(GPU))
    before, jobs, found = device.reads(), [], []
    with torch.cuda.stream(side), no_waits():
        for turn in range(TURNS):
            jobs.append(sparcel.all_reduce(late(comm.rank, turn, base), async_op=True))
            for _ in range(20):
                torch.full_like(base, float("inf"))
        while jobs:
            total = jobs.pop(0).wait()
            delay()
            found.append(total.to_dense())
            del total
    assert device.reads() == before  # the thread of the jobs has read
    side.synchronize()
    return [(one.cpu(), sum_of(comm.size, turn)) for turn, one in enumerate(found)]


def sum_of(ranks: int, turn: int) -> Tensor:
    """Return the sum of what the ranks have from `late`, in plain torch."""
    total, base = torch.zeros(SIZE), torch.arange(COUNT)
    for rank in range(ranks):
        total[base * 3 + rank] += base.float() + rank + turn
    return total


@pytest.mark.parametrize("world_size", [2, 4])
def test_work_is_in_order_though_nobody_waits_for_the_gpu(run_on: Any, world_size: int) -> None:
    for pairs in run_on(world_size, overlapping):
        assert len(pairs) == TURNS
        for found, expected in pairs:
            assert torch.equal(found, expected)


def unheard(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
    """Start exchanges that nobody waits for, and one more; return the sum of that one."""
    base = torch.arange(COUNT, device=GPU).float()
    for turn in range(TURNS):
        sparcel.all_reduce(late(comm.rank, turn, base), async_op=True)
        torch.full_like(base, float("inf"))
    last = sparcel.all_reduce(late(comm.rank, TURNS, base))
    return [(last.to_dense().cpu(), sum_of(comm.size, TURNS))]


def test_jobs_that_nobody_waits_for_disturb_no_others(run_on: Any) -> None:
    for pairs in run_on(2, unheard):
        for found, expected in pairs:
            assert torch.equal(found, expected)


def corrupt(message: Tensor) -> Tensor:
    """Return a message whose last bytes, which are indices, are others."""
    bad = message.clone()
    bad[-8:] = 255
    return bad


def hear(comm: Communicator, call: Callable[[SparseStream], Any]) -> tuple[str, str, float]:
    """Exchange streams of which rank 1 gets corrupt messages; return what was raised there.

    The number is what the GPU computes afterwards: after an access out of bounds it would not.
    """
    indices = torch.arange(0, 3_000, 3, dtype=torch.int32, device=GPU)
    stream = SparseStream.unchecked(indices, torch.ones(1_000, device=GPU), 3_000)
    resolve(None, GPU)
    own, name, said = Staged._to_gpu, "", ""

    def arrive(self: Staged, message: Tensor) -> Tensor:
        return own(self, corrupt(message) if message.numel() > 64 else message)

    with patch.object(Staged, "_to_gpu", arrive if comm.rank == 1 else own):
        try:
            call(stream)
        except (FormatError, CommunicationError) as error:
            name, said = type(error).__name__, str(error)
    return name, said, float(torch.ones(1_000, device=GPU).sum())


def gather(stream: SparseStream) -> Any:
    return sparcel.all_gather(stream)


def gather_beside(stream: SparseStream) -> Any:
    return sparcel.all_gather(stream, async_op=True).wait()


def step(stream: SparseStream) -> Any:
    return sparcel.scheme("topk", density=0.1).step(stream.to_dense())


@pytest.mark.parametrize("call", [gather, gather_beside, step])
def test_a_corrupt_message_is_told_at_the_next_read(run_on: Any, call: Any) -> None:
    """Rank 0 has heard of it, or had ended before."""
    (first, _, there), (second, said, here) = run_on(2, hear, call)
    assert first in ("", "CommunicationError")
    assert (second, there, here) == ("FormatError", 1_000, 1_000)
    assert "corrupt message: index -1 at position" in said
