"""Ranks that call with different arguments all raise an error that says how; none returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparcel
from sparcel import Op, simulate
from sparcel.core import collectives
from sparcel.core.collectives import ALGORITHMS, Estimates
from sparcel.core.comm import Communicator
from sparcel.core.formats import RAW, Expected, Format
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import MismatchError, SparcelError
from tests.strategies import CIRCLE, make_stream
from tests.workers import on_engines_in_turn

SIZE = 40


def own(comm: Communicator, **changed: Any) -> SparseStream:
    """Return this rank's stream, of the size, dtype and width given."""
    settings = {"size": SIZE, "dtype": torch.float32, "width": None} | changed
    return make_stream([1, 5, 6 + comm.rank % 4, 30], comm.rank, **settings)


def reduced(**arguments: Any) -> Callable[[Communicator], object]:
    """Return a call of `sparcel.all_reduce`; ``stream`` holds the changes of the stream."""
    changed = arguments.pop("stream", {})
    return lambda comm: sparcel.all_reduce(own(comm, **changed), group=comm, **arguments)


def waited(**arguments: Any) -> Callable[[Communicator], object]:
    return lambda comm: reduced(**arguments, async_op=True)(comm).wait()  # type: ignore[attr-defined]


def in_order(*ops: str) -> Callable[[Communicator], object]:
    """Return a function that starts reductions in this order, and waits for them."""

    def call(comm: Communicator) -> object:
        jobs = [sparcel.all_reduce(own(comm), op, group=comm, async_op=True) for op in ops]
        return [job.wait() for job in jobs]

    return call


def through(name: str, format: Any = RAW, **arguments: Any) -> Callable[[Communicator], object]:
    """Return a call of a function of `sparcel.core.collectives`."""
    function = getattr(collectives, name)
    return lambda comm: function(own(comm), Wire(comm, format), **arguments)


def sent(root: int, **changed: Any) -> Callable[[Communicator], object]:
    """Return a broadcast of the root's stream, from ``root`` or the last rank before it."""

    def call(comm: Communicator) -> object:
        stream = own(comm, **changed)
        return sparcel.broadcast(stream, root=min(root, comm.size - 1), group=comm)

    return call


def known_to_all(max_nnz: int) -> Callable[[Communicator], object]:
    """Return a broadcast of which all ranks know a bound; a later exchange tells the root."""

    def call(comm: Communicator) -> object:
        expected = Expected(SIZE, torch.float32, None, max_nnz)
        collectives.broadcast(own(comm), Wire(comm), 0, expected)
        return comm.run(lambda: comm.gather_numbers(1))

    return call


def product_of_two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


DIFFERENT = {
    "op": (reduced(op="sum"), reduced(op="max")),
    "op, dense": (reduced(algorithm="dense"), reduced(algorithm="dense", op="max")),
    "op, not blocking": (waited(op="min"), waited(op="product")),
    "order, not blocking": (in_order("sum", "max"), in_order("max", "sum")),
    "op of a user": (reduced(op=CIRCLE), reduced(op=Op(product_of_two, 0))),
    "neutral": (reduced(op=CIRCLE), reduced(op=Op(CIRCLE.function, 1))),
    "op of reduce_scatter": (through("reduce_scatter"), through("reduce_scatter", op=CIRCLE)),
    "algorithm and auto": (reduced(algorithm="ring"), reduced()),
    "max_nnz": (reduced(max_nnz=5), reduced(max_nnz=6)),
    "size": (reduced(), reduced(stream={"size": SIZE + 1})),
    "size, dense": (reduced(algorithm="dense"), reduced(stream={"size": 4 * SIZE})),
    "dtype": (reduced(), reduced(stream={"dtype": torch.int32})),
    "dtype, not blocking": (waited(), waited(stream={"dtype": torch.float64})),
    "width": (reduced(), reduced(stream={"width": 2})),
    "root": (sent(0), sent(1)),
    "root, long": (sent(0, size=4000, width=800), sent(8, size=4000, width=800)),
    "bound of a broadcast": (known_to_all(4), known_to_all(5)),
    "k of gtopk": (through("gtopk", k=2), through("gtopk", k=3)),
    "k of gathered_topk": (through("gathered_topk", k=2), through("gathered_topk", k=3)),
    "k of oktopk": (through("oktopk", k=2), through("oktopk", k=3)),
    "estimates": (
        through(
            "oktopk_reuse",
            k=2,
            estimates=Estimates(None, 1.5, 2),
            renew_boundaries=True,
            renew_threshold=False,
        ),
        through(
            "oktopk_reuse",
            k=2,
            estimates=Estimates(None, 2.5, 2),
            renew_boundaries=True,
            renew_threshold=False,
        ),
    ),
    "bits": (
        through("reduce_scatter", format=Format("raw", 4)),
        through("reduce_scatter", format=Format("raw", 8)),
    ),
    "format": (through("reduce_scatter"), through("reduce_scatter", format=Format("packed"))),
    "collective": (through("all_gather"), through("reduce_scatter")),
    "collective and broadcast": (sent(0), through("all_gather")),
    "collective and algorithm": (through("gtopk", k=3), reduced(algorithm="ring")),
    **{
        f"{one} and {other}": (reduced(algorithm=one), reduced(algorithm=other))
        for one in ALGORITHMS
        for other in ALGORITHMS
        if one < other
    },
}
"""What differs, and the calls of all ranks but one and of that one."""


def outcome(comm: Communicator, what: str, odd: int) -> object:
    """Return what a rank's call raises, or its result."""
    try:
        return DIFFERENT[what][comm.rank == odd](comm)
    except SparcelError as error:
        return error


def assert_all_are_told(outcomes: list[Any], odd: int) -> None:
    for result in outcomes:
        assert isinstance(result, MismatchError), result
        assert f"rank {odd} called " in str(result)
        assert len({call.split(" called ")[1] for call in str(result).split("; ")[-2:]}) == 2


@pytest.mark.parametrize("what", DIFFERENT)
def test_no_rank_returns_a_result(what: str) -> None:
    for world in range(2, 10):
        for odd in {0, 1, world - 1}:
            outcomes = simulate(world, lambda comm: outcome(comm, what, odd)).results  # noqa: B023
            assert_all_are_told(outcomes, odd)


@pytest.mark.processes
@on_engines_in_turn(
    what=["op", "op, dense", "dtype, not blocking", "root", "width", "k of gtopk", "size, dense"],
    world_size=[2, 5],
)
def test_no_process_returns_a_result(run_on, what: str, world_size: int) -> None:
    assert_all_are_told(run_on(world_size, outcome, what, 1), 1)
