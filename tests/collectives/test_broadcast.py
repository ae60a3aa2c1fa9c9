"""Broadcast delivers the root's stream unchanged: short ones down a tree, long ones in parts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparcel import SparseStream, simulate
from sparcel.core.collectives import broadcast
from sparcel.core.collectives.broadcast import TREE_BYTES
from sparcel.core.comm import Communicator
from sparcel.core.comm.simulated import Report
from sparcel.core.formats import Expected
from sparcel.core.wire import Wire
from sparcel.errors import CommunicationError, MismatchError
from tests.collectives.test_traffic import evaluate
from tests.sampling import meeting
from tests.strategies import make_stream, same_stream
from tests.workers import WORLD_SIZES

SIZE = 5000
HEADER = 40


def indices_alone(
    indices: list[int], size: int = SIZE, dtype: torch.dtype = torch.float32
) -> SparseStream:
    """Return a stream without values: rows of width 0 at these indices."""
    index_dtype = torch.int64 if size > 2**31 - 1 else torch.int32
    rows = torch.empty(len(indices), 0, dtype=dtype)
    return SparseStream(torch.tensor(indices, dtype=index_dtype), rows, size)


def expected_of(stream: SparseStream, max_nnz: int) -> Expected:
    return Expected(stream.size, stream.dtype, stream.width, max_nnz, stays_sparse=True)


def from_root(
    stream: SparseStream, root: int, max_nnz: int | None
) -> Callable[[Communicator], SparseStream]:
    """Return a function that broadcasts on a rank, without a bound if ``max_nnz`` is None."""
    expected = None if max_nnz is None else expected_of(stream, max_nnz)

    def on_rank(comm: Communicator) -> SparseStream:
        others = (None, SparseStream(None, torch.ones(3), 3))[comm.rank % 2]  # ignored
        return broadcast(stream if comm.rank == root else others, Wire(comm), root, expected)

    return on_rank


def spread(nnz: int, size: int = SIZE) -> list[int]:
    return [i * size // nnz for i in range(nnz)]


def assert_given(result: SparseStream, stream: SparseStream) -> None:
    assert same_stream(result, stream)
    assert result.values.shape == stream.values.shape
    assert (result.size, result.dtype) == (stream.size, stream.dtype)
    assert result.finite is stream.finite


@pytest.mark.parametrize("world", range(1, 18))
@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_every_rank_gets_the_roots_indices(world: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world - 1))
    count = data.draw(st.integers(0, 60) | st.integers(1000, 3000))
    step = data.draw(st.integers(1, SIZE // max(count, 1)))
    more = data.draw(
        st.integers(0, 40) | st.integers(1000, 2000)
    )  # a short message, or one that is long in every world
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    first = data.draw(st.integers(0, SIZE - count * step))
    stream = indices_alone([first + i * step for i in range(count)], dtype=dtype)
    stream.finite = data.draw(st.booleans())
    max_nnz = max(1, count + more)
    for result in simulate(world, from_root(stream, root, max_nnz)).results:
        assert_given(result, stream)


@pytest.mark.parametrize(
    ("world", "shape"), meeting(range(1, 18), product([20, 1000], [None, 3]), each=2)
)
def test_every_rank_gets_a_stream_without_a_bound(world, shape) -> None:
    entries, width = shape
    for root in {0, world // 2, world - 1}:
        sparse = make_stream(spread(entries), root, SIZE, width=width)
        dense = SparseStream(None, sparse.values, entries)
        for stream in (sparse, dense):
            for result in simulate(world, from_root(stream, root, None)).results:
                assert_given(result, stream)


@pytest.mark.parametrize("world", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("max_nnz", [1, 16, 1000, 2000])
@pytest.mark.parametrize("finite", [True, False])
def test_empty_stream_travels_with_its_finite_flag(world: int, max_nnz: int, finite: bool):
    stream = indices_alone([])
    stream.finite = finite
    for result in simulate(world, from_root(stream, world - 1, max_nnz)).results:
        assert_given(result, stream)


@pytest.mark.parametrize("max_nnz", [4, 1000])
def test_broadcast_sends_indices_of_eight_bytes(max_nnz: int) -> None:
    stream = indices_alone([0, 2**31, 2**40 - 1], size=2**40)
    for result in simulate(3, from_root(stream, 2, max_nnz)).results:
        assert_given(result, stream)


@pytest.mark.parametrize("nnz", [1, 500, 4000])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 17, 32, 100, 256])
def test_volume_is_the_documented_one_for_any_number_of_ranks(world: int, nnz: int) -> None:
    """A rank sends at most twice the bytes of a long message; short ones are sent once a round."""
    root = world // 3
    report: Report[SparseStream] = simulate(world, from_root(indices_alone(spread(nnz)), root, nnz))
    volume = max(traffic.volume for traffic in report.traffic)
    assert volume == evaluate("spread(sparse(k))", world, SIZE, nnz, 0)
    rounds, whole = (world - 1).bit_length(), HEADER + 4 * (nnz + nnz % 2)
    if world <= 2 or whole <= TREE_BYTES:
        for rank, traffic in enumerate(report.traffic):
            assert traffic.bytes_received == (0 if rank == root else whole)
            assert traffic.bytes_sent <= rounds * whole
            assert traffic.messages_received == (rank != root)
            assert traffic.messages_sent <= rounds
        return
    uneven = rounds  # bytes: parts differ by one
    for rank, traffic in enumerate(report.traffic):
        assert traffic.bytes_received <= (whole if rank == root else 1.5 * whole) + uneven
        assert traffic.bytes_sent <= 2 * whole + uneven
        assert traffic.messages_received <= 1 + rounds
        assert traffic.messages_sent <= 2 * rounds


@pytest.mark.parametrize(("nnz", "trees"), [(50, 1), (2000, 2)])
def test_rounds(nnz: int, trees: int) -> None:
    for world in (3, 8, 9, 17):
        report = simulate(world, from_root(indices_alone(spread(nnz)), 0, nnz), latency_s=1)
        assert report.seconds == trees * (world - 1).bit_length()


@pytest.mark.parametrize("nnz", [40, 2000])
def test_error_names_the_rank_with_another_size(nnz: int) -> None:
    def on_rank(comm: Communicator) -> SparseStream:
        stream = indices_alone(spread(nnz), SIZE + (comm.rank == 3))
        return broadcast(stream, Wire(comm), 0, expected_of(stream, nnz))

    with pytest.raises(MismatchError, match=r"rank 3 called broadcast\(.*size=5001"):
        simulate(5, on_rank)


@pytest.mark.parametrize("nnz", [40, 2000])
def test_stream_above_the_agreed_bound_is_refused(nnz: int) -> None:
    stream = indices_alone(spread(2 * nnz))
    with pytest.raises((MismatchError, CommunicationError), match="at most"):
        simulate(5, from_root(stream, 0, nnz))


def over_engine(comm: Communicator, nnz: int) -> list[SparseStream]:
    stream = indices_alone(spread(nnz))
    return [
        from_root(stream, root, max_nnz)(comm)
        for root in range(comm.size)
        for max_nnz in (None, nnz)
    ]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_on_real_processes(run_on, world_size: int) -> None:
    for nnz in (3, 2000):
        for results in run_on(world_size, over_engine, nnz):
            for result in results:
                assert_given(result, indices_alone(spread(nnz)))
