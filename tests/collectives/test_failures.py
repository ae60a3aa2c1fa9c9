"""Ranks that disagree or fail are detected and named, and no rank waits forever."""

import pytest
import torch

from sparcel import SparseStream, simulate
from sparcel.core.auto import all_reduce
from sparcel.core.collectives import ALGORITHMS, all_gather, broadcast, gathered_topk, gtopk
from sparcel.core.collectives.all_reduce import reduce_scatter
from sparcel.core.collectives.oktopk import topk_by_regions
from sparcel.core.wire import Wire
from sparcel.errors import CommunicationError, MismatchError
from tests.strategies import SUM, case_of, dense_reference, full, make_stream

COLLECTIVES = {
    **ALGORITHMS,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "gtopk": lambda stream, wire: gtopk(stream, wire, 6),
    "gathered_topk": lambda stream, wire: gathered_topk(stream, wire, 6),
    "broadcast": lambda stream, wire: broadcast(stream, wire, wire.size // 2),
    "oktopk": lambda stream, wire: topk_by_regions(stream, wire, 6),
}

collectives = pytest.mark.parametrize("name", COLLECTIVES)


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "broadcast"])
@pytest.mark.parametrize("world", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (make_stream([1, 3], 1, 41), "size"),
        (make_stream([1, 3], 1, 4000), "size"),
        (make_stream([1, 3], 1, 40, torch.float64), "dtype"),
        (make_stream([1, 3], 1, 40, width=2), "width"),
    ],
    ids=["size + 1", "size · 100", "dtype", "width"],
)
def test_error_names_the_ranks_that_disagree(name, world, odd, named):
    if name == "gtopk" and odd.width is not None:
        return  # refused before anything is sent
    for culprit in {0, 1, world - 1}:
        streams = [make_stream([1, 5], rank, 40) for rank in range(world)]
        streams[culprit] = odd
        with pytest.raises(MismatchError, match=r"rank \d+ sent .*rank \d+.*" + named):
            simulate(world, lambda comm: COLLECTIVES[name](streams[comm.rank], Wire(comm)))  # noqa: B023


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "dense"])
def test_stream_with_more_entries_than_the_bound_is_refused(name):
    stream = make_stream(range(0, 400, 2), 0, 1000)
    with pytest.raises(MismatchError, match=r"rank \d sent \d+ bytes to rank \d, which expected"):
        simulate(2, lambda comm: all_reduce(stream, Wire(comm), SUM, name, max_nnz=2))


class DiskError(Exception):
    pass


def outcomes(world, culprit, call, function):
    """Run ``function`` on all ranks; the culprit fails in its exchange number ``call``."""

    def on_rank(comm):
        if comm.rank == culprit:
            exchange, calls = comm.exchange_parts, iter(range(10**6))

            def failing(*args):
                if next(calls) == call:
                    raise DiskError("the disk is full")
                return exchange(*args)

            comm.exchange_parts = failing
        try:
            return comm.run(lambda: function(comm))
        except Exception as error:
            return error

    return simulate(world, on_rank).results


@collectives
@pytest.mark.parametrize("world", [2, 3, 6, 8])
def test_failing_rank_fails_every_rank_that_still_needs_it(name, world):
    case = case_of("random", world, 40, count=6)
    reference = dense_reference(case.streams, SUM)
    for culprit in {0, 1, world // 2, world - 1}:
        for call in range(4):
            results = outcomes(
                world,
                culprit,
                call,
                lambda comm: COLLECTIVES[name](case.streams[comm.rank], Wire(comm)),
            )
            if not isinstance(results[culprit], DiskError):
                assert call > 0  # it needed fewer exchanges than that
                continue
            for rank, result in enumerate(results):
                if rank == culprit:
                    continue
                if isinstance(result, CommunicationError):
                    assert f"rank {culprit} failed: the disk is full" in str(result)
                elif name in ALGORITHMS:  # the rank had finished, so its result is right
                    assert torch.equal(full(result), reference)
            if call == 0:  # no rank returns before it has heard from all others
                others = results[:culprit] + results[culprit + 1 :]
                assert all(isinstance(result, CommunicationError) for result in others)


def test_a_communicator_is_dead_after_a_failure():
    def on_rank(comm):
        for _ in range(2):
            try:
                comm.run(lambda: comm.exchange({1 - comm.rank: torch.empty(0)}, {}))
                if comm.rank == 0:
                    comm.run(lambda: 1 / 0)
                comm.run(lambda: comm.exchange({}, {1 - comm.rank: 0}))
            except (ZeroDivisionError, CommunicationError) as error:
                last = error
        return last

    first, second = simulate(2, on_rank).results
    assert isinstance(first, CommunicationError)
    assert isinstance(second, CommunicationError)
    assert "rank 0 failed: division by zero" in str(second)


def test_streams_with_different_entries_are_no_mismatch():
    streams = [
        SparseStream(torch.arange(3), torch.ones(3), 10),
        SparseStream(None, torch.ones(10), 10),
        make_stream([], 0, 10),
    ]
    for name in ALGORITHMS:
        results = simulate(
            3,
            lambda comm: COLLECTIVES[name](streams[comm.rank], Wire(comm)),  # noqa: B023
        ).results
        assert full(results[0]).tolist() == [2] * 3 + [1] * 7
