"""Ranks that give a scheme different settings are told in the first step, whoever drives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sparcel.core.comm import Communicator
from sparcel.core.schemes import (
    Auto,
    Bidirectional,
    Dense,
    GTopK,
    Hierarchical,
    OkTopK,
    Outcome,
    Request,
    ScaleCom,
    Scheme,
    SparCML,
    TopK,
)
from sparcel.core.selectors import RandomK
from sparcel.errors import MismatchError, SparcelError
from tests.schemes.steps import integers, simulate_nodes
from tests.workers import on_engines_in_turn

Make = Callable[[], Scheme]

DIFFERENT: dict[str, tuple[Make, Make]] = {
    "scheme": (TopK, GTopK),
    "density": (partial(TopK, 0.1), partial(TopK, 0.2)),
    "selector": (partial(TopK, 0.1), partial(TopK, 0.1, selector="bucketed")),
    "selector's seed": (
        partial(TopK, 0.1, selector=RandomK(seed=0)),
        partial(TopK, 0.1, selector=RandomK(seed=1)),
    ),
    "warm-up": (TopK, partial(TopK, warmup=[0.5], warmup_steps=2)),
    "momentum": (partial(GTopK, 0.1), partial(GTopK, 0.1, momentum=0.9)),
    "clip": (partial(GTopK, 0.1), partial(GTopK, 0.1, clip=1.0)),
    "algorithm": (partial(TopK, 0.1), partial(TopK, 0.1, algorithm="ring")),
    "put_back": (GTopK, partial(GTopK, put_back="own")),
    "put_back of regions": (OkTopK, partial(OkTopK, put_back="own")),
    "threshold": (OkTopK, partial(OkTopK, threshold="reuse")),
    "returned": (partial(Bidirectional, 0.1), partial(Bidirectional, 0.1, returned=0.5)),
    "bits": (partial(SparCML, 0.4), partial(SparCML, 0.4, bits=4)),
    "seed": (partial(SparCML, 0.4, bits=4), partial(SparCML, 0.4, bits=4, seed=1)),
    "beta": (ScaleCom, partial(ScaleCom, beta=0.5)),
    "candidates": (Auto, partial(Auto, candidates=["topk"])),
    "wire": (Dense, partial(Dense, "bfloat16")),
    "inner": (lambda: Hierarchical(TopK(0.1)), lambda: Hierarchical(TopK(0.2))),
    "inner wire": (lambda: Hierarchical(Dense()), lambda: Hierarchical(Dense("float16"))),
    "nodes": (lambda: Hierarchical(TopK(0.1), 1), lambda: Hierarchical(TopK(0.1))),
    "dense on one rank": (partial(TopK, 0.1), Dense),
}
"""What differs, and the schemes of all ranks but one and of that one."""


def step(scheme: Scheme, comm: Communicator) -> object:
    return scheme.step(integers(comm.rank, 0, 60), comm)


def step_stream(scheme: Scheme, comm: Communicator) -> object:
    return scheme.step_stream(integers(comm.rank, 0, 60), comm)


def begin(scheme: Scheme, comm: Communicator) -> Outcome:
    return comm.submit(lambda: scheme.begin(integers(comm.rank, 0, 60), comm)).wait()


def outcome(
    comm: Communicator, what: str, odd: int, drive: Callable[[Scheme, Communicator], object]
) -> tuple[object, Any]:
    """Return what a rank's step raises, or its update; and the memory afterwards."""
    scheme = DIFFERENT[what][comm.rank == odd]()
    try:
        return drive(scheme, comm), scheme.memory
    except SparcelError as error:
        return error, scheme.memory


def assert_all_are_told(outcomes: list[Any], odd: int) -> None:
    for error, memory in outcomes:
        assert isinstance(error, MismatchError), error
        assert f"rank {odd} called " in str(error)
        assert memory is None


@pytest.mark.parametrize("what", DIFFERENT)
def test_no_rank_returns_an_update(what: str) -> None:
    for world in range(2 + [*DIFFERENT].index(what) % 2, 10, 2):  # each meets half of the worlds
        drive = (begin, step, step_stream)[world % 3]
        for odd in {0, 1, world - 1}:
            outcomes = simulate_nodes(
                world,
                lambda comm: outcome(comm, what, odd, drive),  # noqa: B023
            ).results
            assert_all_are_told(outcomes, odd)


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("make", [Dense, lambda: Hierarchical(Dense())], ids=["dense", "torus2d"])
def test_a_dense_scheme_that_a_driver_begins_with_compares_gradients_once(
    make: Make, steps: int
) -> None:
    """Also in the middle of a training, as after a switch or a checkpoint."""

    def on_rank(comm: Communicator) -> list[int]:
        scheme, sent = make(), []
        scheme.load_state_dict({"steps": steps, "memory": None})
        comm.run(lambda: scheme.connect(comm))
        for _ in range(3):
            before = comm.traffic.messages_sent
            scheme.commit(begin(scheme, comm))
            sent.append(comm.traffic.messages_sent - before)
        return sent

    for first, *others in simulate_nodes(4, on_rank).results:
        assert others == [first - 3] * 2


@pytest.mark.parametrize("other", [Request(ranks=7), Request(scale=2.0)])
def test_requests_that_differ_are_told(other: Request) -> None:
    def on_rank(comm: Communicator) -> None:
        request = other if comm.rank == 1 else Request()
        with pytest.raises(MismatchError, match=r"rank 1 called TopK\(.*\)\.step\(size=60"):
            TopK(0.1).step(integers(comm.rank, 0, 60), comm, request=request)

    simulate_nodes(3, on_rank)


@pytest.mark.processes
@on_engines_in_turn(what=["momentum", "wire"], world_size=[3])
def test_no_process_returns_an_update(run_on: Any, what: str, world_size: int) -> None:
    assert_all_are_told(run_on(world_size, outcome, what, 0, step), 0)
