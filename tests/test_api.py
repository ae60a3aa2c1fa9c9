"""The public collectives: checks of arguments, names, groups, and asynchronous calls."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream, simulate
from sparcel.core.collectives import gtopk
from sparcel.core.comm import Job
from sparcel.errors import CommunicationError, InputError, MismatchError, SparcelError
from tests.strategies import OPS, case_of, cases, dense_reference, full, make_stream, same_stream


def test_every_public_name_exists():
    assert all(hasattr(sparcel, name) for name in sparcel.__all__)
    assert sparcel.__all__ == sorted(sparcel.__all__)


@given(cases())
def test_all_reduce_takes_operations_by_name_or_as_op(case):
    op = case.op if case.op.name is None else case.op.name

    def on_rank(comm):
        blocking = sparcel.all_reduce(case.streams[comm.rank], op, group=comm)
        handle = sparcel.all_reduce(case.streams[comm.rank], op, group=comm, async_op=True)
        assert isinstance(handle, Job)
        assert same_stream(handle.wait(), blocking)
        return blocking

    expected = dense_reference(case.streams, case.op)
    for result in simulate(case.world, on_rank).results:
        assert torch.equal(full(result, case.op), expected)


def test_every_collective_can_be_asynchronous():
    case = case_of("random", 3, 40)

    def on_rank(comm):
        stream = case.streams[comm.rank]
        first = stream if comm.rank == 0 else None
        for now, later in [
            (sparcel.all_gather(stream, comm), sparcel.all_gather(stream, comm, async_op=True)),
            (
                [sparcel.reduce_scatter(stream, "max", comm)],
                [sparcel.reduce_scatter(stream, "max", comm, async_op=True).wait()],
            ),
            (
                [sparcel.broadcast(first, 0, comm)],
                [sparcel.broadcast(first, 0, comm, async_op=True).wait()],
            ),
        ]:
            later = later.wait() if isinstance(later, Job) else later
            assert all(map(same_stream, now, later))

    simulate(3, on_rank)


def _whole(stream):
    return SparseStream(stream.indices, stream.values.int(), stream.size)


def _rows(stream):
    return SparseStream(stream.indices, stream.values[:, None].expand(-1, 2), stream.size)


BAD = [
    (lambda s, c: sparcel.all_reduce(s, "mean", group=c), r"op must be one of sum, .*'mean'"),
    (lambda s, c: sparcel.all_reduce(s, algorithm="ringg", group=c), r"did you mean 'ring'\?"),
    (
        lambda s, c: sparcel.all_reduce(s, algorithm="gtopk", group=c),
        r"all_reduce_topk\(stream, k, a",
    ),
    (lambda s, c: gtopk(s, c, 2), r"wire must be a Wire, got Simulated.*all_reduce_topk take"),
    (lambda s, c: sparcel.all_reduce_topk(s, 2, "oktop", c), r"did you mean 'oktopk' or"),
    (lambda s, c: sparcel.all_reduce_topk(s, 0, group=c), r"k must be at least 1, got 0"),
    (lambda s, c: sparcel.all_reduce_topk(_whole(s), 2, group=c), r"scalar float values, got"),
    (lambda s, c: sparcel.all_reduce_topk(_rows(s), 2, group=c), r"scalar float values, got"),
    (lambda s, c: sparcel.all_reduce_topk(s, 2, max_nnz=1, group=c), r"max_nnz must bound"),
    (lambda s, c: sparcel.all_reduce(s, format="pack", group=c), r"did you mean 'packed' or"),
    (lambda s, c: sparcel.all_reduce(s, format="raw:9", group=c), r"format cannot be 'raw:9'"),
    (lambda s, c: sparcel.all_reduce(s, format="packed4", group=c), r"did you mean 'packed:4' or"),
    (lambda s, c: sparcel.all_reduce(s, "max", format="raw:4", group=c), r"sum.*max"),
    (lambda s, c: sparcel.reduce_scatter(s, "min", c, format="raw:4"), r"sum.*min"),
    (lambda s, c: sparcel.all_gather(_whole(s), c, format="raw:4"), r"scalar floats, got torch.i"),
    (lambda s, c: sparcel.all_reduce(_rows(s), format="raw:4", group=c), r"scalar .* width 2"),
    (lambda s, c: sparcel.broadcast(s, 0, c, format="auto"), r'format="auto" needs'),
    (lambda s, c: sparcel.broadcast(None, 0, c, format="auto"), r'"auto" needs every'),
    (lambda s, c: sparcel.all_reduce(s, group="world"), r"group must be .*, got 'world'"),
    (lambda s, c: sparcel.all_reduce(s.to_dense(), group=c), r"SparseStream.*got Tensor"),
    (lambda s, c: sparcel.all_gather([s], group=c), r"SparseStream.*got list"),
    (lambda s, c: sparcel.reduce_scatter(None, group=c), r"SparseStream, got None"),
    (lambda s, c: sparcel.broadcast(s, 2, c), r"root must be a rank in \[0, 2\), got 2"),
    (lambda s, c: sparcel.broadcast(None, 0, c), r"rank 0 is the root and must pass a stream"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_refused_before_anything_is_sent(call, message):
    def on_rank(comm):
        try:
            call(make_stream([1, 4], comm.rank, 9), comm)
        except InputError:
            assert comm.traffic.messages_sent == 0
            raise

    with pytest.raises(InputError, match=message):
        simulate(2, on_rank)


@pytest.mark.parametrize("format", ["packed:4", "raw:2", "raw:bfloat16"])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_what_a_format_rounds_away_is_returned(world, format):
    generator = torch.Generator().manual_seed(world)
    streams = [
        sparcel.topk(torch.randn(300, generator=generator, dtype=torch.float64), 90)
        for _ in range(world)
    ]

    def on_rank(comm):
        own = streams[comm.rank]
        return (
            sparcel.all_reduce(own, group=comm, format=format),
            sparcel.reduce_scatter(own, group=comm, format=format),
            sparcel.all_gather(own, comm, format=format),
            sparcel.broadcast(own if comm.rank == 0 else None, 0, comm, format=format),
        )

    results = simulate(world, on_rank).results
    expected = sum(map(full, streams))
    totals, regions, gathered, sent = zip(*results, strict=True)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
    assert all(same_stream(total, totals[0][0]) for total, _ in totals)
    close(full(totals[0][0]) + sum(full(lost) for _, lost in totals), expected)
    whole = torch.cat([full(region) for region, _ in regions])
    close(whole + sum(full(lost) for _, lost in regions), expected)
    for rank, (parts, lost) in enumerate(gathered):
        assert all(map(same_stream, parts, gathered[0][0]))
        close(full(parts[rank]) + full(lost), full(streams[rank]))
    close(full(sent[-1][0]) + full(sent[0][1]), full(streams[0]))
    assert not any(full(lost).any() for _, lost in sent[1:])


@given(
    st.sampled_from(["oktopk", "gtopk", "gathered_topk"]),
    st.sampled_from(["raw", "auto", "packed:4", "raw:2"]),
    st.integers(1, 9),
    st.integers(1, 200),
    st.integers(1, 30),
    st.booleans(),
)
def test_the_largest_and_what_all_ranks_lost_are_the_sum(
    algorithm, format, world, size, k, bounded
):
    generator = torch.Generator().manual_seed(world * size)
    streams = [
        sparcel.topk(torch.randn(size, generator=generator, dtype=torch.float64), k)
        for _ in range(world)
    ]

    def on_rank(comm):
        by = {"algorithm": algorithm, "format": format, "max_nnz": k if bounded else None}
        now = sparcel.all_reduce_topk(streams[comm.rank], k, group=comm, **by)
        later = sparcel.all_reduce_topk(streams[comm.rank], k, group=comm, async_op=True, **by)
        assert all(map(same_stream, now, later.wait()))
        return now

    results = simulate(world, on_rank).results
    expected = sum(map(full, streams))
    total = results[0][0]
    assert all(same_stream(one, total) for one, _ in results)
    assert not total.is_dense and total.nnz <= k
    lost = sum(full(lost) for _, lost in results)
    torch.testing.assert_close(full(total) + lost, expected, rtol=0, atol=1e-12)
    if format in ("raw", "auto") and algorithm != "gtopk":
        assert same_stream(total, sparcel.topk(expected, k))


def test_all_errors_derive_from_sparcel_error():
    assert issubclass(InputError, SparcelError)
    assert issubclass(InputError, ValueError)
    assert issubclass(MismatchError, ValueError)
    assert issubclass(CommunicationError, RuntimeError)


def test_result_on_one_rank_shares_no_memory_with_the_input():
    """With P = 1 too, changing the result does not change the input."""
    for algorithm in ("dense", "allgather", "recursive_doubling", "split_allgather", "ring"):
        for stream in (make_stream([1, 4], 3, 90), SparseStream(None, torch.arange(4.0), 4)):
            before = stream.values.clone()

            def on_rank(comm):
                sparcel.all_reduce(stream, algorithm=algorithm, group=comm).values.fill_(7)  # noqa: B023
                sparcel.reduce_scatter(stream, group=comm).values.fill_(7)  # noqa: B023
                sparcel.all_gather(stream, group=comm)[0].values.fill_(7)  # noqa: B023
                sparcel.broadcast(stream, group=comm).values.fill_(7)  # noqa: B023

            simulate(1, on_rank)
            assert torch.equal(stream.values, before), algorithm


def through_the_default_group(comm):
    """Use torch's default process group; the workers have one."""
    stream = make_stream([comm.rank, 20], comm.rank, 64)
    handle = sparcel.all_reduce(stream, "sum", "ring", async_op=True)
    results = [sparcel.all_reduce(stream, op) for op in ("sum", "product", "min", "max")]
    return [
        handle.wait(),
        *results,
        *sparcel.all_reduce_topk(stream, 1),
        *sparcel.all_gather(stream),
    ]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 5])
def test_default_process_group_is_used_if_none_is_given(run_on, world_size):
    streams = [make_stream([rank, 20], rank, 64) for rank in range(world_size)]
    for ring, *by_op in run_on(world_size, through_the_default_group):
        assert torch.equal(full(ring), dense_reference(streams, OPS["sum"]))
        largest, _, *gathered = by_op[4:]
        assert same_stream(largest, sparcel.topk(full(ring), 1))
        for name, result in zip(("sum", "product", "min", "max"), by_op[:4], strict=True):
            assert torch.equal(full(result, OPS[name]), dense_reference(streams, OPS[name]))
        assert all(map(same_stream, gathered, streams))


def test_simulated_ranks_share_no_results():
    def on_rank(comm):
        mine = stream_of(comm.rank)
        root = sparcel.broadcast(mine if comm.rank == 0 else None, group=comm)
        gathered = sparcel.all_gather(mine, group=comm)
        comm.gather_numbers(0)  # wait until all ranks have their results
        for stream in (root, *gathered):
            stream.values.mul_(100)
        return mine.values.clone()

    for rank, values in enumerate(sparcel.simulate(3, on_rank).results):
        assert torch.equal(values, stream_of(rank).values)


def stream_of(rank):
    return sparcel.SparseStream(torch.tensor([rank, 7]), torch.tensor([1.0 + rank, 5.0]), 10)
