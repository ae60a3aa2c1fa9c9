"""A call is described alike in every process, and ranks in different calls do not wait in vain."""

from __future__ import annotations

import time

import pytest
import torch

from sparcel import simulate
from sparcel.core.comm import Call, Communicator, call_of
from sparcel.core.comm.calls import Calls, differences
from sparcel.core.ops import MAX, SUM, Op
from sparcel.errors import CommunicationError, MismatchError


def example(stream: None, wire: None, op: Op = SUM, k: int = 3) -> None:
    """Stand for a collective."""


def test_defaults_and_keywords_make_no_difference() -> None:
    facts = (("size", 5), ("dtype", torch.float32))
    call = call_of(example, facts, (), ())
    assert call.text == "example(op=sum, k=3, size=5, dtype=float32)"
    assert call == call_of(example, facts, (SUM, 3), ()) == call_of(example, facts, (), (("k", 3),))
    others = [call_of(example, facts, (MAX,), ()), call_of(example, facts, (SUM, 4), ())]
    assert len({call.fingerprint, *(other.fingerprint for other in others)}) == 3


def test_a_fingerprint_does_not_depend_on_the_process() -> None:
    assert Call.of("example", {"k": 3}).fingerprint == 0x2B358DA7


def test_objects_without_a_text_are_named_by_their_type() -> None:
    assert Call.of("f", {"x": object()}).text == "f(x=object)"


def test_calls_inside_calls_have_fingerprints_and_positions_of_their_own() -> None:
    calls, outer, inner = Calls(), Call.of("outer", {}), Call.of("inner", {})
    seen = []
    for _ in range(2):
        outside = calls.begin(outer, "")
        seen.append((calls.fingerprint, calls.latest))
        for label in ("", "split"):
            around = calls.begin(inner, label)
            seen.append((calls.fingerprint, calls.latest))
            calls.under_way, calls.fingerprint = around
        assert calls.fingerprint == outer.fingerprint
        calls.under_way, calls.fingerprint = outside
        assert calls.fingerprint == 0
    fingerprints, places = zip(*seen, strict=True)
    assert len(set(fingerprints)) == 2
    assert [place.position for place in places] == ["/1"] * 3 + ["/2"] * 3
    # The arguments of calls on a split communicator may differ between the ranks of the whole.
    histories = ["outer()\n", "outer()\n inner()\n", "outer()\n inner()\n"]
    assert [place.history for place in places] == 2 * histories
    assert places[1].texts == "outer()\ninner()"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({0: "f(1)", 1: "f(1)"}, ""),
        ({3: "f(1)"}, ""),
        ({0: "f(1)", 2: "f(2)", 1: "f(1)"}, "ranks 0, 1 called f(1); rank 2 called f(2)"),
        ({0: "f\ng(1)", 1: "f\ng(2)\nh"}, "rank 0 called g(1); rank 1 called g(2)"),
        ({0: "f", 1: "f\ng"}, "rank 0 called f; rank 1 called g"),
    ],
)
def test_only_what_differs_is_said(texts: dict[int, str], said: str) -> None:
    assert differences(texts) == said


def wait_in_own_call(comm: Communicator) -> tuple[str, str, float]:
    """Wait for a message that no rank sends, in a call with another argument on each rank.

    Odd ranks wait in a call inside it.
    """
    peer = (comm.rank + 1) % comm.size
    start = time.monotonic()

    def wait() -> object:
        return comm.exchange({}, {peer: 8})

    def wait_inside() -> object:
        return comm.call(Call.of("inside", {}), wait)

    with pytest.raises(MismatchError) as error:
        comm.call(Call.of("wait", {"for": peer}), wait_inside if comm.rank % 2 else wait)
    return str(error.value), comm.label, time.monotonic() - start


@pytest.mark.parametrize("world", [2, 3, 9])
def test_deadlock_in_different_calls_is_a_disagreement(world: int) -> None:
    said, *_ = simulate(world, wait_in_own_call).results[0]
    assert said.startswith("deadlock, no rank can go on: rank 0 waits for rank 1, ")
    assert said.endswith(f"; rank {world - 1} called wait(for=0)")


def test_deadlock_in_one_call_is_no_disagreement() -> None:
    def on_rank(comm: Communicator) -> None:
        comm.call(Call.of("wait", {}), lambda: comm.exchange({}, {1 - comm.rank: 8}))

    with pytest.raises(CommunicationError, match="deadlock"):
        simulate(2, on_rank)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "split"), [("gloo", True), ("mpi", False)])
def test_processes_that_wait_in_different_calls_are_told_long_before_the_timeout(
    request: pytest.FixtureRequest, engine: str, split: bool
) -> None:
    run_on = request.getfixturevalue(f"run_on_{engine}")
    for said, label, seconds in run_on(3, wait_after_others, split):
        assert all(f"rank {rank} called wait(for={(rank + 1) % 3})" in said for rank in range(3))
        assert label.endswith(".7") is split
        assert seconds < 10


def wait_after_others(comm: Communicator, split: bool) -> tuple[str, str, float]:
    """Wait on the communicator, or on one split from it, after different numbers of other calls."""
    alone = comm.split(10 + comm.rank)
    for _ in range(comm.rank):
        alone.call(Call.of("nothing", {}), lambda: None)
    return wait_in_own_call(comm.split(7) if split else comm)


@pytest.mark.parametrize(("world", "given"), [(2, 3), (8, 5), (9, 5), (17, 3)])
def test_blocks_must_have_the_lengths_that_all_ranks_know(world: int, given: int) -> None:
    """Otherwise all later blocks would be shifted."""
    errors: list[Exception] = []

    def on_rank(comm: Communicator) -> None:
        lengths = [8] * world
        lengths[1] = given if comm.rank == 1 else 4
        block = torch.zeros(lengths[comm.rank], dtype=torch.uint8)
        try:
            comm.run(lambda: comm.gather_blocks(block, lengths))
        except Exception as error:
            errors.append(error)
            raise

    with pytest.raises(MismatchError, match=f"rank 1 sent {given} bytes to rank ., which expected"):
        simulate(world, on_rank)
    assert errors
    assert all(isinstance(error, MismatchError) for error in errors)
