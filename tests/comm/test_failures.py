"""Errors of the survivors after a rank dies, fails, is late or leaves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import sparcel
from sparcel.core.comm import TorchCommunicator
from sparcel.core.comm.failure import wait_until
from sparcel.errors import CommunicationError, InputError, MismatchError
from tests.strategies import case_of
from tests.workers import run_apart

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TIMEOUT = 4.0
SHORT_TIMEOUT = 1.5
"""Of groups on which ranks wait until it is over."""

BYTES = 10_000
WORLD_SIZE = 4
CULPRIT = 2


def ring(comm: TorchCommunicator, nbytes: int = BYTES) -> None:
    """Do one step of a ring, in which only its neighbours exchange with the culprit."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.exchange({after: torch.zeros(nbytes, dtype=torch.uint8)}, {before: BYTES})


def die(comm: TorchCommunicator) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_input_error(comm: TorchCommunicator) -> None:
    raise InputError("density must lie in (0, 1], got 3")


def come_late(comm: TorchCommunicator) -> None:
    time.sleep(1.5 * SHORT_TIMEOUT)


def send_too_much(comm: TorchCommunicator) -> None:
    ring(comm, BYTES + 1)


def leave(comm: TorchCommunicator) -> None:
    comm.close()


def steps(
    comm: TorchCommunicator, misbehave: Callable[[TorchCommunicator], None], in_job: bool
) -> tuple[str, str, str, float]:
    """Return the error of steps of which one fails, the next job's error, and the seconds."""

    def job() -> None:
        for step in range(3 * WORLD_SIZE):
            if comm.rank == CULPRIT and step == 1 and in_job:
                misbehave(comm)
            ring(comm)

    if comm.rank == CULPRIT and not in_job:
        misbehave(comm)
    start = time.monotonic()
    with pytest.raises((CommunicationError, InputError, MismatchError)) as first:
        comm.run(job)
    seconds = time.monotonic() - start
    with pytest.raises(CommunicationError) as later:
        comm.run(job)
    return type(first.value).__name__, str(first.value), str(later.value), seconds


def test_killed_rank_is_named_by_all() -> None:
    ends = run_apart(WORLD_SIZE, steps, die, True, timeout=TIMEOUT)
    assert ends.pop(CULPRIT).died == -signal.SIGKILL
    for end in ends:
        kind, text, later, seconds = end.result
        assert kind == "CommunicationError"
        assert "lost its connection to rank 2" in text
        assert text in later
        assert seconds < TIMEOUT


def transfer_until_killed(comm: TorchCommunicator, culprit: int) -> tuple[str, float]:
    """Exchange long messages until a kill interrupts one."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    message = torch.zeros(8 << 20, dtype=torch.uint8)
    if comm.rank == culprit:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            start = time.monotonic()
            comm.exchange({after: message}, {before: message.numel()})
    except CommunicationError as error:
        return str(error), time.monotonic() - start


@pytest.mark.parametrize("culprit", [0, CULPRIT])
def test_kill_during_a_long_message(culprit: int) -> None:
    timeout = 100.0  # Gloo itself would let ranks with half a message wait until then
    ends = run_apart(WORLD_SIZE, transfer_until_killed, culprit, timeout=timeout)
    assert ends.pop(culprit).died == -signal.SIGKILL
    assert len({end.result[0] for end in ends}) == 1
    assert f"lost its connection to rank {culprit}" in ends[0].result[0]
    assert all(end.result[1] < timeout / 2 for end in ends)


def reduce_in_two_ways(comm: TorchCommunicator) -> tuple[str, str, float]:
    """Run an all-reduce on this thread, with another one queued, while the culprit dies."""
    if comm.rank == CULPRIT:
        threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if comm.rank == 0:
        time.sleep(1.2)  # the others, including the culprit, wait in the all-reduce
    stream, handles = case_of("random", comm.size, 60).streams[comm.rank], []

    def queue() -> None:
        handles.append(sparcel.all_reduce(stream, group=comm, async_op=True))

    later = threading.Timer(0.3, queue)
    later.start()
    start = time.monotonic()
    with pytest.raises(CommunicationError) as first:
        comm.all_reduce(torch.ones(10))
    seconds = time.monotonic() - start
    later.join()
    with pytest.raises(CommunicationError) as queued:
        handles[0].wait()
    return str(first.value), str(queued.value), seconds


def test_kill_during_an_all_reduce_ends_it_and_the_queued_one() -> None:
    timeout = 100.0
    ends = run_apart(WORLD_SIZE, reduce_in_two_ways, timeout=timeout)
    assert ends.pop(CULPRIT).died == -signal.SIGKILL
    assert len({end.result[0] for end in ends}) == 1
    for end in ends:
        cause, queued, seconds = end.result
        assert "lost its connection to" in cause
        assert cause in queued
        assert seconds < timeout / 2


def on_a_group(
    comm: TorchCommunicator,
    misbehave: Callable[[TorchCommunicator], None],
    timeout: float = TIMEOUT,
    in_job: bool = True,
) -> tuple[str, str, str, float]:
    """Return what `steps` does on a new group of the pool's ranks, which survive."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    return steps(TorchCommunicator.of(group), misbehave, in_job)


def test_error_in_a_job_reaches_all(run_on) -> None:
    ends = run_on(WORLD_SIZE, on_a_group, raise_input_error)
    texts = ["rank 2 failed: InputError: density must lie in (0, 1], got 3"] * WORLD_SIZE
    texts[CULPRIT] = "density must lie in (0, 1], got 3"
    assert [text for _, text, *_ in ends] == texts
    assert [kind for kind, *_ in ends].count("InputError") == 1
    assert all("rank 2 failed: InputError: density" in later for *_, later, _ in ends)
    assert all(seconds < TIMEOUT for *_, seconds in ends)


def test_late_rank_fails_as_well(run_on) -> None:
    ends = run_on(WORLD_SIZE, on_a_group, come_late, SHORT_TIMEOUT)
    assert {kind for kind, *_ in ends} == {"CommunicationError"}
    assert len({text for _, text, *_ in ends}) == 1  # the first cause
    assert f"waited {SHORT_TIMEOUT:g} s for rank" in ends[0][1]
    for rank, (*_, seconds) in enumerate(ends):
        assert rank == CULPRIT or SHORT_TIMEOUT <= seconds < 3 * SHORT_TIMEOUT


def test_message_too_long_is_an_error_and_no_crash(run_on) -> None:
    ends = run_on(WORLD_SIZE, on_a_group, send_too_much)
    mismatch = (
        "rank 2 sent 10001 bytes to rank 3, which expected at most 10000; "
        "the ranks' sizes, dtypes or counts differ"
    )
    assert ends[3][:2] == ("MismatchError", mismatch)
    for rank in (0, 1, 2):
        assert ends[rank][:2] == (
            "MismatchError",
            f"rank 3 failed: MismatchError: {mismatch}",
        )


def test_rank_that_leaves_is_named(run_on) -> None:
    ends = run_on(WORLD_SIZE, on_a_group, leave, TIMEOUT, False)
    assert "closed" in ends[CULPRIT][1]
    for rank in (0, 1, 3):
        kind, text, *_ = ends[rank]
        assert kind == "CommunicationError"
        assert text.startswith("rank 2 closed its communicator before the others: it ended")


def connect_without(comm: TorchCommunicator, culprit: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=SHORT_TIMEOUT))
    assert isinstance(group, dist.ProcessGroup)
    if comm.rank == culprit:
        return ""
    with pytest.raises(CommunicationError) as caught:
        TorchCommunicator.of(group)
    return str(caught.value)


@pytest.mark.parametrize("culprit", [0, CULPRIT])
def test_connecting_without_a_rank_is_a_communication_error(run_on, culprit: int) -> None:
    ends = run_on(WORLD_SIZE, connect_without, culprit)
    assert ends.pop(culprit) == ""
    for rank, text in zip(set(range(WORLD_SIZE)) - {culprit}, ends, strict=True):
        others = [other for other in range(WORLD_SIZE) if other != rank]
        assert text.startswith(f"rank {rank} could not connect to ranks {others}, which must")


def split_without(comm: TorchCommunicator) -> str:
    """Split; the culprit gives its colour, but never connects."""
    own = TorchCommunicator.of(dist.new_group(timeout=timedelta(seconds=SHORT_TIMEOUT)))
    if comm.rank == CULPRIT:
        own.run(lambda: own.gather_numbers(0))
        comm.gather_numbers(0)  # the others have given up
        return ""
    with pytest.raises(CommunicationError) as caught:
        own.split(0)
    comm.gather_numbers(0)
    return str(caught.value)


def test_splitting_without_a_rank_is_a_communication_error(run_on) -> None:
    ends = run_on(WORLD_SIZE, split_without)
    assert ends.pop(CULPRIT) == ""
    assert all("could not connect to ranks" in text for text in ends)


def test_waiting_asks_at_least_once_and_until_the_answer_is_yes() -> None:
    assert wait_until(lambda: True, 0.0)
    assert not wait_until(lambda: False, 0.0)
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 60.0)
