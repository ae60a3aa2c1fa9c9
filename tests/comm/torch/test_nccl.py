"""NCCL's engine with Gloo's process group below it, because no two GPUs were available.

What it does with torch.distributed is real; NCCL itself is not, and the card takes a GPU's place.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparcel import SparseStream, simulate
from sparcel.collectives import ALGORITHMS, broadcast, gtopk, oktopk
from sparcel.comm import Communicator
from sparcel.comm.engine import ALL_CONTROL, PeerErrors
from sparcel.comm.torch.nccl import NcclEngine
from sparcel.errors import MismatchError
from sparcel.formats import Format
from sparcel.ops import SUM
from sparcel.side_stream import SideStream
from sparcel.wire import Wire
from tests.card import CARD, moved, on_card, seen
from tests.strategies import case_of, full

pytestmark = pytest.mark.processes

CALL = 7


class OverGloo(NcclEngine):
    """The engine over Gloo; ``transferred`` lists the lengths of what each transfer sent."""

    def __init__(self, comm: Communicator, device: torch.device | str = "cpu") -> None:
        self._errors, self.waiting = PeerErrors(range(comm.size), comm.rank), False
        self.device = torch.device(device)
        self._group = dist.new_group(list(range(comm.size)), backend="gloo")
        self.transferred: list[list[int]] = []

    def _transfer(self, pairs):
        self.transferred.append([message.numel() for _, message, _ in pairs])
        super()._transfer([(peer, seen(message), seen(buffer)) for peer, message, buffer in pairs])

    def all_reduce(self, tensor, op, call):
        super().all_reduce(seen(tensor), op, call)


def numbers(rank: int, nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) * 7 + rank).to(torch.uint8)


def exchange(comm, lengths, control):
    """Exchange messages of ``lengths[rank]`` bytes; return the parts that came, and transfers."""
    engine, rank = OverGloo(comm), comm.rank
    others = [peer for peer in range(comm.size) if peer != rank]
    own = numbers(rank, lengths[rank])
    parts = [own[:control], own[control:]] if control < own.numel() else [own]
    arrived = engine.exchange(
        dict.fromkeys(others, parts), {peer: lengths[peer] for peer in others}, CALL, control
    )
    assert list(arrived) == others
    for peer, parts in arrived.items():
        assert torch.equal(torch.cat(parts), numbers(peer, lengths[peer]))
    return [[part.numel() for part in parts] for parts in arrived.values()], engine.transferred


def test_control_travels_first_and_payload_apart(run_on):
    for parts, (frames, rests) in run_on(3, exchange, [1000, 1040, 40], 40):
        assert all(part[0] == 40 for part in parts)
        assert frames == [4096, 4096]
        assert all(nbytes in (960, 1000, 1) for nbytes in rests)  # 1: nothing, one way


def test_messages_without_payload_take_one_transfer(run_on):
    for parts, transfers in run_on(3, exchange, [8, 0, 4080], ALL_CONTROL):
        assert all(len(part) == 1 for part in parts)
        assert transfers == [[4096, 4096], []]


def test_long_control_arrives_whole(run_on):
    for parts, transfers in run_on(3, exchange, [5000, 4080, 4081], ALL_CONTROL):
        assert all(len(part) == 1 for part in parts)
        assert len(transfers) == 2
    for parts, _ in run_on(2, exchange, [9000, 9000], 8000):
        assert parts == [[8000, 1000]]


def test_payload_alone_is_not_in_a_frame(run_on):
    for parts, (_, rests) in run_on(2, exchange, [77, 77], 0):
        assert parts == [[77]]
        assert rests == [77]


def disagree(comm, call, nbytes):
    with pytest.raises(MismatchError) as caught:
        OverGloo(comm).exchange(
            {1 - comm.rank: [numbers(0, nbytes)]}, {1 - comm.rank: 8}, call * comm.rank, 0
        )
    return str(caught.value)


def test_other_calls_and_longer_messages_are_refused(run_on):
    assert all("another call" in text for text in run_on(2, disagree, 1, 8))
    assert all("9 bytes" in text and "at most 8" in text for text in run_on(2, disagree, 0, 9))


def from_the_card(stream: SparseStream) -> SparseStream:
    indices = None if stream.indices is None else seen(stream.indices)
    return SparseStream.unchecked(indices, seen(stream.values), stream.size)


def reduced(comm: Communicator, format: Format) -> list[Any]:
    """Return what every collective makes of a case."""
    case = case_of("random", comm.size, 3000, count=200)
    stream = case.streams[comm.rank]
    if comm.device.type == CARD:
        assert stream.indices is not None
        stream = SparseStream.unchecked(moved(stream.indices), moved(stream.values), stream.size)
    results = []
    for algorithm in ALGORITHMS.values():
        wire = Wire(comm, format)
        results.append(algorithm.reduce(stream, wire, SUM, case.max_nnz))
    results += [collective(stream, Wire(comm), 50).total for collective in (gtopk, oktopk)]
    results.append(broadcast(stream, Wire(comm), comm.size - 1))
    return [full(from_the_card(result)).tolist() for result in results]


def reduced_by_engine(comm, format, device):
    """Return what `reduced` does; on the card the host waits for what it reads alone."""
    child = comm.split(0)
    with on_card() if device == CARD else nullcontext():
        child.engine = OverGloo(child, device)
        child.device, child._side = child.engine.device, SideStream(child.engine.device)
        return child.submit(lambda: reduced(child, format)).wait()


@pytest.mark.parametrize(
    ("world_size", "format", "device"),
    [(8, "packed", "cpu"), (2, "packed", CARD), (3, "raw", CARD)],
)
def test_collectives_have_the_results_of_other_engines(run_on, world_size, format, device):
    if device == CARD:
        pytest.importorskip("triton")
    expected = simulate(world_size, lambda comm: reduced(comm, Format(format))).results
    assert run_on(world_size, reduced_by_engine, Format(format), device) == expected
