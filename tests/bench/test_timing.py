"""A cell's time, phases, bytes and verdict."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparcel import simulate
from sparcel.core.auto import all_reduce
from sparcel.core.comm import Communicator
from sparcel.core.formats import RAW
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.tools.bench import timing
from sparcel.tools.bench.contenders import Contender
from sparcel.tools.bench.inputs import Case
from sparcel.tools.bench.timing import Measured, Stopwatch, time_contender, watched

RunOn = Callable[..., list[Any]]
CASE = Case(1000, 0.05, "uniform", 2)


def _measured(comm: Communicator, wrong_on: int = -1) -> Measured:
    """Measure a sum; one rank counts 3 wrong coordinates in every result."""
    own = CASE.streams[comm.rank]
    contender = Contender(
        lambda: all_reduce(own, Wire(comm), algorithm="allgather", max_nnz=CASE.k),
        lambda result: 3 if comm.rank == wrong_on else 0,
    )
    return time_contender(contender, comm, iterations=4, warmup=1)


def _measured_twice(comm: Communicator) -> tuple[Measured, Measured]:
    return _measured(comm), _measured(comm, wrong_on=1)


@pytest.mark.processes
def test_ranks_agree_on_what_they_measured(run_on: RunOn) -> None:
    (one, wrong), other = run_on(2, _measured_twice)
    assert (one, wrong) == other
    assert len(one.seconds) == 4
    assert all(seconds > 0 for seconds in one.seconds)
    assert one.bytes == RAW.nbytes(CASE.k, CASE.size, 4)
    assert one.wrong == 0
    assert wrong.wrong == 2 * 3  # in the last warm-up run, and in the last timed run
    assert set(one.phases) == set(timing.PHASES)
    assert one.phases["encode"] > 0 and one.phases["exchange"] > 0 and one.phases["reduce"] > 0
    assert one.phases["select"] == 0


def test_the_engines_own_calls_count_as_exchange() -> None:
    def job(comm: Communicator) -> Measured:
        return time_contender(Contender(lambda: None, lambda _: 0, bytes=7), comm, 3, 1)

    measured = simulate(1, job).results[0]
    assert measured.bytes == 7
    assert measured.phases["exchange"] > 0
    assert measured.phases["select"] == measured.phases["encode"] == measured.phases["reduce"] == 0


def test_every_iteration_is_reset_first() -> None:
    def job(comm: Communicator) -> list[str]:
        calls: list[str] = []
        contender = Contender(
            lambda: calls.append("run"), lambda _: 0, lambda: calls.append("reset")
        )
        time_contender(contender, comm, iterations=2, warmup=3)
        return calls

    calls = simulate(1, job).results[0]
    assert calls == ["reset", "run"] * (3 + 2 + 2)  # warm-up, timed, with the stopwatch on


def test_the_last_timed_result_is_checked() -> None:
    def job(comm: Communicator) -> tuple[int, list[int]]:
        runs = itertools.count(1)
        checked: list[int] = []

        def wrong(run: int) -> int:
            checked.append(run)
            return int(run == 5)

        return time_contender(Contender(lambda: next(runs), wrong), comm, 3, 2).wrong, checked

    assert simulate(1, job).results[0] == (1, [2, 5])


def test_phases_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch()
    clock = iter([0.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(clock))
    with watch.part("reduce"), watch.part("select"), watch.part("a part of no phase"):
        pass
    assert (watch.seconds["reduce"], watch.seconds["select"]) == (3.0, 3.0)


def test_only_what_runs_while_it_is_watched_counts() -> None:
    def job(comm: Communicator) -> dict[str, float]:
        own, wire = SparseStream.from_dense(torch.arange(10.0)), Wire(comm)
        with watched() as watch:
            wire.pack(own.largest(3))
        counted = dict(watch.seconds)
        wire.pack(own)
        assert watch.seconds == counted
        return counted

    seconds = simulate(1, job).results[0]
    assert seconds["select"] > 0 and seconds["encode"] > 0
    assert seconds["exchange"] == seconds["reduce"] == 0


def _gathering(comm: Communicator) -> list[tuple[float, float]]:
    """Return the seconds counted as exchange, and all seconds, of a short and of a long gather."""
    found = []
    for nbytes in (8, 1 << 20):
        message = torch.zeros(nbytes, dtype=torch.uint8)
        with watched() as watch:
            start = time.perf_counter()
            comm.gather(message, nbytes)
            found.append((watch.seconds["exchange"], time.perf_counter() - start))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["run_on_gloo", "run_on_mpi"])
def test_a_gather_is_exchange_and_counted_once(engine: str, request: pytest.FixtureRequest) -> None:
    """Engines gather by their own call, or by exchanges that must not be counted twice."""
    for found in request.getfixturevalue(engine)(2, _gathering):
        assert all(0 < exchange <= whole for exchange, whole in found)
