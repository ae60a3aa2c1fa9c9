"""The simulated cluster with many ranks: messages in parts, exact repetition, all collectives."""

import weakref

import pytest
import torch
from hypothesis import given

from sparcel import simulate
from sparcel.core.collectives import ALGORITHMS, gtopk
from sparcel.core.comm import Network, SimulatedCommunicator
from sparcel.core.wire import Wire
from sparcel.errors import MismatchError
from tests.strategies import SUM, case_of, dense_reference, full, worlds


def message(*numbers):
    return torch.tensor(numbers, dtype=torch.uint8)


def everybody(comm):
    """Return the other ranks."""
    return [rank for rank in range(comm.size) if rank != comm.rank]


def parts_of_others(comm):
    """Return messages to all others, in one to three parts."""
    return {
        peer: [message(comm.rank, peer, part) for part in range(1 + (comm.rank + peer) % 3)]
        for peer in everybody(comm)
    }


@given(worlds)
def test_messages_in_parts_count_as_if_they_were_joined(world):
    def joined(parts):
        return torch.cat(list(parts)).tolist()

    def on_rank(comm, exchange):
        received = exchange(comm, parts_of_others(comm), dict.fromkeys(everybody(comm), 9), 0)
        return {source: joined(parts) for source, parts in received.items()}

    shared = simulate(world, lambda comm: on_rank(comm, type(comm).exchange_parts))
    joining_parts = joining(SimulatedCommunicator.exchange_parts)
    copied = simulate(world, lambda comm: on_rank(comm, joining_parts))
    assert shared.results == copied.results
    assert shared.traffic == copied.traffic
    for rank, received in enumerate(shared.results):
        for source, numbers in received.items():
            count = 1 + (rank + source) % 3
            assert numbers == [n for part in range(count) for n in (source, rank, part)]


def test_a_message_received_whole_has_its_parts_joined():
    def on_rank(comm):
        peer = 1 - comm.rank
        if comm.rank:
            return comm.exchange({peer: message(7)}, {peer: 9})[peer].tolist()
        return comm.exchange_parts({peer: [message(1), message(2, 3)]}, {peer: 9}, 0)[peer]

    whole, parts = simulate(2, on_rank).results[::-1]
    assert whole == [1, 2, 3]
    assert [part.tolist() for part in parts] == [[7]]


def test_parts_above_the_bound_are_named():
    def on_rank(comm):
        comm.exchange_parts({1 - comm.rank: [message(1, 2, 3)] * 3}, {1 - comm.rank: 8}, 0)

    with pytest.raises(MismatchError, match=r"rank \d sent 9 bytes to rank \d, .* at most 8"):
        simulate(2, on_rank)


@pytest.mark.parametrize("name", [*ALGORITHMS, "gtopk"])
def test_sharing_parts_changes_nothing_that_is_counted(name, monkeypatch):
    case = case_of("random", 5, 500)

    def run():
        report = simulate(5, reducing(name, case))
        return report.results, report.traffic, report.seconds_on(Network(1, 64, 3))

    shared = run()
    monkeypatch.setattr(
        SimulatedCommunicator, "exchange_parts", joining(SimulatedCommunicator.exchange_parts)
    )
    assert run() == shared


def joining(exchange_parts):
    """Return an ``exchange_parts`` that joins parts before sending, as real communicators do."""

    def whole(comm, sends, receives, control):
        joined = {rank: [torch.cat(list(parts))] for rank, parts in sends.items()}
        return exchange_parts(comm, joined, receives, control)

    return whole


def reducing(name, case):
    """Return a program that reduces the case's streams and returns the result as lists."""

    def on_rank(comm):
        stream = case.streams[comm.rank]
        if name == "gtopk":
            return full(gtopk(stream, Wire(comm), case.max_nnz).total).tolist()
        return full(ALGORITHMS[name](stream, Wire(comm), SUM, case.max_nnz)).tolist()

    return on_rank


@pytest.mark.parametrize("name", [*ALGORITHMS, "gtopk"])
def test_runs_of_many_ranks_repeat_message_by_message(name):
    case = case_of("random", 33, 400, count=9)

    def run():
        report = simulate(33, reducing(name, case), latency_s=1e-3, bandwidth=1e6)
        trace = report.trace
        messages = (trace.sources, trace.destinations, trace.nbytes, trace.events)
        return report.results, report.traffic, report.seconds, messages

    assert run() == run()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*ALGORITHMS, "gtopk"} - {"dense", "ring"}))
def test_collectives_with_messages_of_many_ranks_work_on_more_than_a_hundred(name):
    world, size = 136, 10_000  # no power of two, and more than a signed byte counts
    case = case_of("random", world, size, count=100)
    results = simulate(world, reducing(name, case), ranks_per_node=8).results
    assert all(result == results[0] for result in results)
    exact = dense_reference(case.streams, SUM)
    if name == "gtopk":  # its selection is not exact, but has at most k coordinates
        assert 0 < torch.tensor(results[0]).count_nonzero() <= 100
    else:
        assert results[0] == exact.tolist()


@pytest.mark.parametrize("name", [*ALGORITHMS, "gtopk"])
def test_sums_are_freed_when_ranks_no_longer_use_them(name):
    case, alive = case_of("disjoint", 32, 2000, count=9), weakref.WeakSet()
    most = 0

    def on_rank(comm):
        nonlocal most
        stream = case.streams[comm.rank]
        if name == "gtopk":
            total = gtopk(stream, Wire(comm), case.max_nnz).total
        else:
            total = ALGORITHMS[name](stream, Wire(comm), SUM, case.max_nnz)
        alive.add(total.values)
        most = max(most, len(alive))
        return total.nnz

    simulate(32, on_rank)
    assert most == 1
