"""The root's indices on every rank: exactly those, at a volume that does not grow with P."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, simulate
from sparcel.collectives.index_broadcast import index_broadcast
from sparcel.comm import Communicator, Report
from sparcel.errors import CommunicationError, MismatchError
from tests.workers import WORLD_SIZES

SIZE = 5000


def leader_of(indices: list[int], size: int = SIZE, dtype: torch.dtype = torch.float32):
    """Return the stream of a leader that selected these."""
    index_dtype = torch.int64 if size > 2**31 - 1 else torch.int32
    values = torch.arange(1, len(indices) + 1).to(dtype)
    return SparseStream(torch.tensor(indices, dtype=index_dtype), values, size)


def from_root(
    leader: SparseStream, root: int, max_nnz: int
) -> Callable[[Communicator], SparseStream]:
    """Return what a rank does; all but the root have something else, dense or sparse."""

    def on_rank(comm: Communicator) -> SparseStream:
        if comm.rank == root:
            return index_broadcast(leader, comm, root, max_nnz)
        mine = SparseStream.unchecked(None, leader.values.new_ones(3), leader.size)
        if comm.rank % 2:
            mine = mine.empty_like()
        return index_broadcast(mine, comm, root, max_nnz)

    return on_rank


def spread(nnz: int, size: int = SIZE) -> list[int]:
    return [i * size // nnz for i in range(nnz)]


def assert_given(result: SparseStream, leader: SparseStream) -> None:
    assert result.indices is not None and leader.indices is not None
    assert result.indices.dtype == leader.indices.dtype
    assert torch.equal(result.indices, leader.indices)
    assert result.values.shape == (leader.nnz, 0)
    assert (result.size, result.dtype) == (leader.size, leader.dtype)
    assert result.finite is leader.finite


@pytest.mark.parametrize("world", range(1, 18))
@given(data=st.data())
def test_every_rank_gets_the_roots_indices(world: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world - 1))
    indices = sorted(data.draw(st.sets(st.integers(0, SIZE - 1), max_size=60)))
    more = data.draw(st.integers(0, 40))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    leader = leader_of(indices, dtype=dtype)
    leader.finite = data.draw(st.booleans())
    max_nnz = max(1, len(indices) + more)
    for result in simulate(world, from_root(leader, root, max_nnz)).results:
        assert_given(result, leader)


@pytest.mark.parametrize("world", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("max_nnz", [1, 3, 16, 1000])
@pytest.mark.parametrize("finite", [True, False])
def test_a_root_without_indices_gives_none_and_its_flag(world: int, max_nnz: int, finite: bool):
    leader = leader_of([])
    leader.finite = finite
    for result in simulate(world, from_root(leader, world - 1, max_nnz)).results:
        assert_given(result, leader)


def test_indices_beyond_four_bytes_travel_too() -> None:
    leader = leader_of([0, 2**31, 2**40 - 1], size=2**40)
    for result in simulate(3, from_root(leader, 2, 4)).results:
        assert_given(result, leader)


HEADERS = 40 + 8
"""A message's header, and what rounds its indices up to 8 bytes."""


@pytest.mark.parametrize("nnz", [1, 500, 4000])
@pytest.mark.parametrize("world", [2, 3, 5, 8, 17, 32, 100, 256])
def test_the_volume_does_not_grow_with_the_ranks(world: int, nnz: int) -> None:
    """Nor do the headers, but with the number of rounds."""
    root = world // 3
    report: Report[SparseStream] = simulate(world, from_root(leader_of(spread(nnz)), root, nnz))
    rounds = (world - 1).bit_length()
    words, headers = 4 * nnz, 3 * rounds * HEADERS
    for rank, traffic in enumerate(report.traffic):
        assert traffic.bytes_received <= (words if rank == root else 1.5 * words) + headers
        assert traffic.bytes_sent <= 2 * words + headers
        assert traffic.messages_received <= 1 + rounds
        assert traffic.messages_sent <= 2 * rounds


def test_rounds() -> None:
    for world in (1, 2, 3, 8, 9, 17):
        report = simulate(world, from_root(leader_of(spread(50)), 0, 50), latency_s=1)
        assert report.seconds <= 2 * (world - 1).bit_length()


def test_ranks_of_another_size_are_named() -> None:
    def on_rank(comm: Communicator) -> SparseStream:
        size = SIZE + (comm.rank == 3)
        return index_broadcast(leader_of(spread(40), size), comm, 0, 40)

    with pytest.raises((MismatchError, CommunicationError), match="sent rank"):
        simulate(5, on_rank)


def test_more_than_was_agreed_on_is_refused() -> None:
    with pytest.raises((MismatchError, CommunicationError), match="at most"):
        simulate(5, from_root(leader_of(spread(400)), 0, 40))


def over_gloo(comm: Communicator, nnz: int) -> list[SparseStream]:
    return [from_root(leader_of(spread(nnz)), root, nnz)(comm) for root in range(comm.size)]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_over_gloo(run_on, world_size: int) -> None:
    for nnz in (3, 500):
        for results in run_on(world_size, over_gloo, nnz):
            for result in results:
                assert_given(result, leader_of(spread(nnz)))
