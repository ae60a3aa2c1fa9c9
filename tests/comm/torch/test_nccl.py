"""NCCL's engine with Gloo's process group below it: see `tests.nccl`."""

from __future__ import annotations

import signal
from functools import partial

import pytest
import torch

from sparcel import simulate
from sparcel.core.comm.engine import ALL_CONTROL
from sparcel.core.formats import Format
from sparcel.errors import MismatchError
from tests import nccl
from tests.card import CARD
from tests.nccl import OverGloo, connected, numbers
from tests.workers import run_apart

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them over NCCL"),
]

CALL = 7


def exchange(comm, lengths, control):
    """Exchange messages of ``lengths[rank]`` bytes; return the parts that came, and transfers."""
    with connected(comm, "cpu") as far:
        engine, rank = far.engine, comm.rank
        assert isinstance(engine, OverGloo)
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
    with connected(comm, "cpu") as far, pytest.raises(MismatchError) as caught:
        far.engine.exchange(
            {1 - comm.rank: [numbers(0, nbytes)]}, {1 - comm.rank: 8}, call * comm.rank, 0
        )
    return str(caught.value)


def test_other_calls_and_longer_messages_are_refused(run_on):
    assert all("another call" in text for text in run_on(2, disagree, 1, 8))
    assert all("9 bytes" in text and "at most 8" in text for text in run_on(2, disagree, 0, 9))


@pytest.mark.parametrize(
    ("world_size", "format", "place"),
    [(8, "packed", "cpu"), (3, "raw", CARD)],
)
def test_collectives_have_the_results_of_other_engines(run_on, world_size, format, place):
    def expected(comm):
        return nccl.reduced_here(comm, comm, Format(format))

    there = simulate(world_size, expected).results
    assert run_on(world_size, nccl.reduced, Format(format), place) == there


@pytest.mark.parametrize(("world_size", "in_rows"), [(1, True), (2, False), (3, True)])
def test_rows_are_swapped_and_spread_without_a_read(run_on, world_size, in_rows):
    nccl.check_rows(run_on(world_size, nccl.rows_of, in_rows), in_rows)


def test_steps_have_the_bits_of_those_by_way_of_the_host(run_on):
    run_on(4, nccl.steps_in_both_ways, ["dense", "hitopk 4 bits"])


def test_training_in_ddp_has_the_bits_of_that_by_way_of_the_host(run_on):
    run_on(2, partial(nccl.train_in_both_ways, scheme_or_name="topk", density=0.05), "cpu")


@pytest.mark.parametrize(
    ("world_size", "name", "sharded"),
    [(2, "bidirectional 4 bits", False), (4, "topk", True)],
)
def test_averages_have_the_bits_of_those_by_way_of_the_host(run_on, world_size, name, sharded):
    run_on(world_size, nccl.average_in_both_ways, name, sharded)


@pytest.mark.parametrize("program", ["mixed", "marked"])
def test_ranks_that_mixed_up_calls_find_it_at_the_next_frame_or_mark(run_on, program):
    nccl.check_ends(run_on(2, nccl.end_in, program), program)


def test_ranks_that_queue_others_find_it_before_anything_commits(run_on):
    nccl.check_others(run_on(2, nccl.queue_others))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["die", "late", "other"])
def test_all_ranks_end_when_one_dies_is_late_or_disagrees(program):
    ends = run_apart(3, nccl.end_in, program, timeout=nccl.TIMEOUT)
    if program == "die":
        assert ends.pop(nccl.CULPRIT).died == -signal.SIGKILL
    nccl.check_ends([end.result for end in ends], program)
