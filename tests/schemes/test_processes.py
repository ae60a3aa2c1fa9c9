"""Schemes on real processes return the same bits as on the simulated cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

import sparcel
from sparcel.core.comm import Communicator, TorchCommunicator
from sparcel.core.comm.simulated import SimulatedCommunicator
from sparcel.core.schemes import Hierarchical, OkTopK
from sparcel.errors import CommunicationError, MismatchError
from tests.sampling import meeting
from tests.schemes.steps import (
    DISTINCT,
    EXACT,
    SCHEMES,
    copy_of,
    integers,
    memory_of,
    normal,
    ranks_per_node,
    simulate_nodes,
    total,
)
from tests.strategies import same_bits
from tests.workers import ENGINES, on_engines_in_turn, run_apart

pytestmark = pytest.mark.processes

BETWEEN_NODES = ["hitopk", "torus2d", "scalecom between nodes"]

SUMMED_BY_THE_ENGINE = ["dense"]
"""Whose sums are in the engine's own order."""


@contextmanager
def launched(comm: Communicator) -> Iterator[None]:
    """Set the launcher's variables to as many ranks a node as on the simulated cluster.

    There ranks know their nodes, and have one environment.
    """
    local = comm.rank % ranks_per_node(comm.size)
    real = not isinstance(comm, SimulatedCommunicator)
    with patch.dict(os.environ, {"LOCAL_RANK": str(local)} if real else {}):
        yield


def several_steps(comm, name, gradient):
    """Do three steps, the second of them poisoned; return the updates and what is owed."""
    scheme, outcomes = SCHEMES[name](), []
    for step in range(3):
        vector = gradient(comm.rank, step, 700)
        if step == 1 and comm.rank == comm.size - 1:
            vector[99] = float("nan")
        with launched(comm):
            outcomes += [scheme.step(vector, comm), memory_of(scheme)]
    return outcomes


@pytest.mark.parametrize(
    ("name", "world_size", "run_on"),
    [
        (*pair, ENGINES[number % 2])
        for number, pair in enumerate(meeting(DISTINCT, [2, 3, 4], each=2))
    ],
    indirect=["run_on"],
)
def test_steps_equal_those_of_the_simulated_cluster(run_on, world_size, name):
    for gradient in (integers, normal):
        by_rank = run_on(world_size, several_steps, name, gradient)
        simulated = simulate_nodes(
            world_size,
            lambda comm: several_steps(comm, name, gradient),  # noqa: B023
        ).results
        for outcomes, references in zip(by_rank, simulated, strict=True):
            assert all(map(same_bits, outcomes[::2], by_rank[0][::2]))
            if name in SUMMED_BY_THE_ENGINE:
                torch.testing.assert_close(outcomes, references, equal_nan=True)
            else:
                assert all(map(same_bits, outcomes, references))
        if gradient is integers and name in EXACT and world_size != 3:
            came_out = world_size * total([by_rank[0][0], by_rank[0][4]])
            kept = total(outcomes[5] for outcomes in by_rank)
            went_in = total(integers(r, s, 700) for r in range(world_size) for s in (0, 2))
            assert torch.equal(came_out + kept, went_in)


def counted(comm, name):
    """Return the messages and bytes of a step, and of the step before, which creates groups."""
    scheme, counts = SCHEMES[name](), []
    for step in range(2):
        before = vars(comm.traffic).copy()
        with launched(comm):
            scheme.step(integers(comm.rank, step, 600), comm)
        counts.append({kind: count - before[kind] for kind, count in vars(comm.traffic).items()})
    return counts


@on_engines_in_turn(name=BETWEEN_NODES)
def test_traffic_between_and_inside_nodes_is_counted(run_on, name):
    simulated = simulate_nodes(4, lambda comm: counted(comm, name)).results
    real = run_on(4, counted, name)
    # Earlier tests may have created the groups already; only the first step differs.
    assert [steps[1] for steps in real] == [steps[1] for steps in simulated]
    assert all(steps[1]["bytes_sent"] > 0 for steps in real)


def mismatched(comm, name, longer):
    """Return each rank's error if some ranks have another size, and its memory afterwards."""
    scheme = SCHEMES[name]()
    try:
        with launched(comm):
            scheme.step(integers(comm.rank, 0, 300 + (comm.rank in longer)), comm)
    except (MismatchError, CommunicationError) as error:
        return error, scheme.memory
    return None


@on_engines_in_turn(name=DISTINCT)
def test_every_rank_names_gradients_of_different_size(run_on, name):
    for error, memory in run_on(3, mismatched, name, [1]):
        assert "sent rank" in str(error) or "bytes" in str(error)
        assert memory is None


@on_engines_in_turn(name=BETWEEN_NODES, longer=[[2], [2, 3]])  # a rank, and a node
def test_every_rank_names_nodes_with_gradients_of_different_size(run_on, name, longer):
    for error, memory in run_on(4, mismatched, name, longer):
        assert "sent rank" in str(error) or "bytes" in str(error)
        assert memory is None


@contextmanager
def exchanging_by(comm: Communicator, exchange: Callable[..., Any]) -> Iterator[None]:
    """Replace the exchange of this communicator and of all split from it."""
    by_exchange = {"exchange_parts": exchange, "gather_parts": Communicator.gather_parts}
    with patch.multiple(type(comm), **by_exchange):
        yield


def fails_in_its_second_step(comm, name):
    """Return each rank's error, and whether its memory is that of the last committed step."""
    scheme = SCHEMES[name]()
    exchange, before = type(comm).exchange_parts, None

    def failing(*args):
        if scheme.steps == 1 and comm.rank == 1:
            raise OSError("the disk is full")
        return exchange(*args)

    with launched(comm), exchanging_by(comm, failing):
        try:
            for step in range(2):
                before = copy_of(scheme.memory)
                scheme.step(integers(comm.rank, step, 300), comm)
        except (OSError, CommunicationError) as error:
            return error, same_bits(scheme.memory, before)
    return None


@on_engines_in_turn(name=[name for name in DISTINCT if name != "dense"])
def test_failing_rank_fails_the_step_everywhere_and_memory_is_unchanged(run_on, name):
    """After its first step, dense uses no exchange except the engine's."""
    for error, memory_stayed in run_on(4, fails_in_its_second_step, name):
        assert "rank 1 failed" in str(error) or isinstance(error, OSError)
        assert memory_stayed


TIMEOUT = 20.0


def hitopk():
    return sparcel.scheme("hitopk", density=0.1)


def oktopk_between_nodes():
    return Hierarchical(OkTopK(0.1))


def killed_in_a_step(comm, make, exchanges):
    """Step until rank 2 dies before its exchange number ``exchanges`` of the third step.

    Return the error, whether memory is that of the last committed step, and the seconds that the
    last step took.
    """
    scheme, done = make(), 0
    exchange = TorchCommunicator.exchange_parts

    def mortal(*args):
        nonlocal done
        done += scheme.steps == 2
        if comm.rank == 2 and done == exchanges:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*args)

    with launched(comm), patch.object(TorchCommunicator, "exchange_parts", mortal):
        while True:
            before, start = copy_of(scheme.memory), time.monotonic()
            try:
                scheme.step(integers(comm.rank, scheme.steps, 300), comm)
            except CommunicationError as error:
                seconds = time.monotonic() - start
                return str(error), same_bits(scheme.memory, before), scheme.steps, seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "exchanges"), [(hitopk, 1), (oktopk_between_nodes, 2), (hitopk, 3)]
)
def test_every_rank_names_a_rank_that_dies_between_nodes(make: Callable[[], None], exchanges: int):
    outcomes = run_apart(4, killed_in_a_step, make, exchanges, timeout=TIMEOUT)
    assert outcomes.pop(2).died == -signal.SIGKILL
    for outcome in outcomes:
        text, memory_stayed, steps, seconds = outcome.result
        assert "lost its connection to rank 2" in text
        assert memory_stayed
        # The other node may or may not have finished the step when the rank died.
        assert steps in ((2,) if exchanges == 1 else (2, 3))
        assert seconds < TIMEOUT / 2
