"""Collectives on real processes return the same bits as on the simulated cluster."""

import pytest
import torch

import sparcel
from sparcel import simulate
from sparcel.core.auto import all_reduce
from sparcel.core.collectives import (
    ALGORITHMS,
    Estimates,
    gathered_topk,
    gtopk,
    oktopk,
    oktopk_reuse,
)
from sparcel.core.collectives.oktopk import topk_by_regions
from sparcel.core.formats import FewBits, Format
from sparcel.core.stream import reduce
from sparcel.core.wire import Wire
from sparcel.errors import CommunicationError, InputError, MismatchError
from tests.sampling import meeting
from tests.strategies import (
    CIRCLE,
    DTYPES,
    LAYOUTS,
    OPS,
    SUM,
    case_of,
    dense_reference,
    full,
    make_stream,
    same_stream,
)
from tests.workers import ENGINES, WORLD_SIZES, on_engines_in_turn

pytestmark = pytest.mark.processes
world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES)


def random_case(world, seed):
    """Return a case whose sums are rounded."""
    case = case_of("random", world, 300, count=40, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for stream in case.streams:
        stream.values = torch.randn(stream.nnz, generator=generator)
    return case


def all_cases(world, name):
    """Yield cases that cover every layout, operation, dtype and the small sizes."""
    for number, layout in enumerate(LAYOUTS):
        yield case_of(layout, world, 97, DTYPES[number % len(DTYPES)])
    for number, op in enumerate(OPS.values()):
        if name == "dense" and op == CIRCLE:
            continue  # the engine does not support user-defined operations
        yield case_of("random", world, 50, DTYPES[-1 - number], op, width=2 if number % 2 else None)
    for size in (0, 1, world - 1):
        yield case_of("random", world, size)


def reduce_cases(comm, name):
    """Reduce every case, with and without a bound on the entries."""
    return [
        all_reduce(case.streams[comm.rank], Wire(comm), case.op, name, bound)
        for case in all_cases(comm.size, name)
        for bound in (None, case.max_nnz)
    ]


@pytest.mark.parametrize(
    ("name", "world_size", "run_on"),
    [
        (*pair, ENGINES[number % 2])
        for number, pair in enumerate(meeting([*ALGORITHMS, "auto"], WORLD_SIZES, each=2))
    ],
    indirect=["run_on"],
)
def test_all_reduce_equals_the_dense_reference_on_every_rank(run_on, world_size, name):
    by_rank = run_on(world_size, reduce_cases, name)
    simulated = simulate(world_size, lambda comm: reduce_cases(comm, name)).results[0]
    expected = [case for case in all_cases(world_size, name) for _ in range(2)]
    for case, reference, *results in zip(expected, simulated, *by_rank, strict=True):
        assert torch.equal(full(results[0], case.op), dense_reference(case.streams, case.op))
        assert all(same_stream(result, reference) for result in results)


def parts_of(outcome):
    return outcome.total, outcome.dropped


def rounded(stream, comm, format):
    """Return rounded sums, the global top-k, and what this rank lost of all of them."""
    wire = Wire(comm, format, step=3)
    sums = [all_reduce(stream, wire, SUM, name) for name in ALGORITHMS if name != "dense"]
    sums.append(gtopk(stream, wire, 25).total)
    lost = [part.placed(start, stream.size) for start, part in wire.take_lost()]
    return [*sums, reduce([stream.empty_like(), *lost])]


def run_everything(comm, seed):
    """Return the result of each collective on values whose sums are rounded."""
    stream, wire = random_case(comm.size, seed).streams[comm.rank], Wire(comm)
    voided = random_case(comm.size, seed).streams[comm.rank]
    voided.finite = comm.rank != comm.size - 1
    return [
        *(all_reduce(stream, wire, SUM, name) for name in ALGORITHMS if name != "dense"),
        *sparcel.all_gather(stream, group=comm),
        sparcel.broadcast(stream if comm.rank == comm.size - 1 else None, comm.size - 1, comm),
        sparcel.reduce_scatter(stream, group=comm),
        *rounded(stream, comm, Format("packed", 4)),
        *rounded(stream, comm, Format("raw", FewBits(2, stochastic=True, seed=seed))),
        *parts_of(gtopk(stream, wire, 25)),
        *parts_of(oktopk(stream, wire, 25)),
        *parts_of(topk_by_regions(stream, wire, 25)),
        *parts_of(oktopk_reuse(stream, wire, 25, Estimates(None, None), True, True)[0]),
        *parts_of(gathered_topk(stream, wire, 25)),
        all_reduce(voided, wire, SUM, "split_allgather"),
    ]


@world_sizes
def test_every_collective_has_the_bits_of_the_simulated_cluster(run_on, world_size):
    by_rank = run_on(world_size, run_everything, 5)
    simulated = simulate(world_size, lambda comm: run_everything(comm, 5)).results
    for results, references in zip(by_rank, simulated, strict=True):
        assert all(map(same_stream, results, references))
    assert not by_rank[0][-1].finite


def bytes_sent(comm):
    before = comm.traffic.bytes_sent, comm.traffic.messages_sent
    run_everything(comm, 6)
    return comm.traffic.bytes_sent - before[0], comm.traffic.messages_sent - before[1]


@world_sizes
def test_counters_equal_those_of_the_simulated_cluster(run_on, world_size):
    assert run_on(world_size, bytes_sent) == simulate(world_size, bytes_sent).results


def disagree(comm, name):
    size = 41 if comm.rank == 1 else 40
    try:
        comm.run(lambda: all_reduce(make_stream([1, 3], 0, size), Wire(comm), SUM, name))
    except (MismatchError, CommunicationError) as error:
        return error
    return None


@on_engines_in_turn(name=ALGORITHMS)
def test_every_rank_names_the_ranks_that_disagree(run_on, name):
    errors = run_on(3, disagree, name)
    assert all(errors)
    assert any(isinstance(error, MismatchError) for error in errors)
    assert all("sent rank" in str(error) or "bytes" in str(error) for error in errors)


def fail_in_the_middle(comm, name):
    """Return each rank's error when the last rank fails before it sends anything."""

    def failing(*_):
        raise OSError("the disk is full")

    if comm.rank == comm.size - 1:
        comm.exchange_parts = comm.gather_parts = failing
    try:
        return comm.run(lambda: all_reduce(make_stream([1, 3], 0, 40), Wire(comm), SUM, name))
    except Exception as error:
        return error
    finally:
        for name in ("exchange_parts", "gather_parts"):
            vars(comm).pop(name, None)


@on_engines_in_turn(name=ALGORITHMS)
def test_failing_rank_tells_the_others(run_on, name):
    results = run_on(4, fail_in_the_middle, name)
    assert isinstance(results[-1], OSError)
    assert all(isinstance(result, CommunicationError) for result in results[:-1])
    assert all("rank 3" in str(result) for result in results[:-1])
    assert any("the disk is full" in str(result) for result in results[:-1])


def reduce_by_circle(comm):
    return all_reduce(make_stream([1, 3], 0, 40), Wire(comm), CIRCLE, "dense")


def test_operation_unknown_to_the_engine_is_refused(run_on):
    with pytest.raises(InputError, match="algorithm='recursive_doubling' takes any operation"):
        run_on(2, reduce_by_circle)
