"""The communicator over Gloo, on real processes."""

from __future__ import annotations

import pytest
import torch

from sparcel.comm import TorchCommunicator
from sparcel.comm.gloo import FRAME_BYTES
from tests.workers import WORLD_SIZES

pytestmark = pytest.mark.processes

world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES)


def message(source: int, destination: int, nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) * (7 + source) + 31 * destination).to(torch.uint8)


def all_to_all(comm: TorchCommunicator, nbytes: int) -> list[bool]:
    """Each rank sends ``nbytes`` + destination bytes to each other rank."""
    others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
    received = comm.exchange(
        {rank: message(comm.rank, rank, nbytes + rank) for rank in others},
        dict.fromkeys(others, nbytes + comm.size),
    )
    assert all(part.data_ptr() % 8 == 0 for part in received.values())
    return [
        torch.equal(received[rank], message(rank, comm.rank, nbytes + comm.rank)) for rank in others
    ]


@world_sizes
@pytest.mark.parametrize(
    "nbytes", [0, 1, 1000, 65536, FRAME_BYTES - 10, FRAME_BYTES, 3 * FRAME_BYTES]
)
def test_messages_arrive_whole(run_on, world_size: int, nbytes: int) -> None:
    for arrived in run_on(world_size, all_to_all, nbytes):
        assert arrived == [True] * (world_size - 1)
