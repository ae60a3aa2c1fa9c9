"""Collectives, schemes and costs work with any format."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given

from sparcel import SparseStream, scheme, simulate
from sparcel.core.collectives import (
    ALGORITHMS,
    Estimates,
    all_gather,
    broadcast,
    gathered_topk,
    gtopk,
    oktopk,
    oktopk_reuse,
    reduce_scatter,
)
from sparcel.core.collectives.oktopk import topk_by_regions
from sparcel.core.formats import RAW, FewBits, Format, Lengths, decode, nbytes_of
from sparcel.core.ops import MAX, SUM
from sparcel.core.schemes import ON_NODES, SCHEMES, SEND_ALL
from sparcel.core.wire import Wire
from tests.cost.test_traffic import anywhere, streams_at
from tests.sampling import meeting
from tests.strategies import same_stream, streams

EXACT = [Format("packed"), Format("chunked")]
LOSSY = [
    Format("packed", 4),
    Format("raw", 8),
    Format("packed", 2),
    Format("packed", "bfloat16"),
    Format("raw", "float16"),
    Format("packed", FewBits(4, block=16, scale="float32", stochastic=True, seed=7)),
]
WORLDS = (1, 2, 3, 5, 8)
SIZE, K = 9001, 300
id_of = lambda format: format.name  # noqa: E731


REDUCTIONS = {
    name: lambda stream, wire, algorithm=algorithm: algorithm(stream, wire, SUM, K)
    for name, algorithm in ALGORITHMS.items()
}
OUTCOMES = {
    "gtopk": lambda stream, wire: gtopk(stream, wire, K),
    "gathered_topk": lambda stream, wire: gathered_topk(stream, wire, K, K),
    "oktopk": lambda stream, wire: oktopk(stream, wire, K, K),
    "by regions": lambda stream, wire: topk_by_regions(stream, wire, K, K),
    "oktopk_reuse": lambda stream, wire: oktopk_reuse(stream, wire, K, Estimates(), True, True, K)[
        0
    ],
}
SELECTIONS = {
    name: lambda stream, wire, select=select: select(stream, wire).total
    for name, select in OUTCOMES.items()
}
OTHERS = {
    "reduce_scatter": lambda stream, wire: reduce_scatter(stream, wire, SUM, K),
    "all_gather": lambda stream, wire: all_gather(stream, wire)[-1],
    "broadcast": lambda stream, wire: broadcast(stream, wire, wire.size - 1),
}
COLLECTIVES = REDUCTIONS | SELECTIONS | OTHERS


def run(call, given, format):
    return simulate(len(given), lambda comm: call(given[comm.rank], Wire(comm, format)))


@pytest.mark.parametrize(("name", "kind"), meeting(COLLECTIVES, product(EXACT, WORLDS), each=5))
def test_every_collective_has_the_same_bits_as_with_the_plain_one(name, kind) -> None:
    format, ranks = kind
    given = streams_at(anywhere(ranks, SIZE, K), SIZE)
    plain, other = (run(COLLECTIVES[name], given, f).results for f in (RAW, format))
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(one.to_dense(), two.to_dense())


@pytest.mark.parametrize("format", EXACT, ids=id_of)
def test_other_operations_rows_and_integers_work_with_any_format(format) -> None:
    for ranks in (1, 3, 9):
        rows = [
            SparseStream(at, torch.stack((at, at + rank), dim=1).int(), SIZE)
            for rank, at in enumerate(anywhere(ranks, SIZE, 40))
        ]
        for name, algorithm in ALGORITHMS.items():
            call = lambda s, wire, a=algorithm: a(s, wire, MAX, None)  # noqa: E731
            plain, other = (run(call, rows, f).results[0] for f in (RAW, format))
            fill = MAX.neutral_for(torch.int32)
            assert torch.equal(plain.to_dense(fill), other.to_dense(fill)), name


WITH_FORMAT = [name for name in SCHEMES if name not in SEND_ALL]


@pytest.mark.parametrize(("name", "kind"), meeting(WITH_FORMAT, product(EXACT, WORLDS), each=4))
def test_every_scheme_has_the_same_updates_as_with_the_plain_format(name, kind) -> None:
    format, ranks = kind
    here = next(count for count in (2, 3, 1) if ranks % count == 0)
    settings = {"ranks_per_node": here} if name in ON_NODES else {}
    draw = torch.Generator().manual_seed(ranks)
    gradients = torch.randint(-8, 9, (ranks, 2, 2500), generator=draw).float()

    def two_steps(comm, format):
        made = scheme(name, format=format, **settings)
        return [made.step(own, comm) for own in gradients[comm.rank]]

    plain, other = (
        simulate(ranks, lambda comm, f=f: two_steps(comm, f)).results for f in (RAW, format)
    )
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(torch.stack(one), torch.stack(two))


@pytest.mark.parametrize("format", EXACT, ids=id_of)
@given(stream=streams())
def test_a_message_is_as_long_as_its_format_tells(format, stream) -> None:
    compact = stream.compact(dense_at=format.dense_from(stream.size, stream.value_bytes))
    message = format.encode(compact).message
    assert same_stream(decode(message, stream), compact)
    nnz = None if compact.is_dense else compact.nnz
    nbytes = nbytes_of(message)
    assert nbytes == format.nbytes(nnz, stream.size, stream.value_bytes)
    assert nbytes <= Lengths(format, stream.size, stream.value_bytes).most_bytes(stream.nnz)


LOSING = [name for name in COLLECTIVES if name != "dense"]


@pytest.mark.parametrize(("name", "kind"), meeting(LOSING, product(LOSSY, WORLDS), each=6))
def test_what_ranks_lose_is_what_their_result_lacks(name, kind) -> None:
    check_what_is_lost(OUTCOMES.get(name, COLLECTIVES[name]), name, *kind, K)


MANY = SIZE * 4 // 5


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", ["gtopk", "gathered_topk", "oktopk", "by regions"])
def test_nothing_is_lost_where_few_bits_make_numbers_of_zeros(name, ranks) -> None:
    """Messages of so many entries are dense, and 2 bits have no zero."""
    call = {
        "gtopk": lambda stream, wire: gtopk(stream, wire, MANY),
        "gathered_topk": lambda stream, wire: gathered_topk(stream, wire, MANY, MANY),
        "oktopk": lambda stream, wire: oktopk(stream, wire, MANY, MANY),
        "by regions": lambda stream, wire: topk_by_regions(stream, wire, MANY, MANY),
    }[name]
    check_what_is_lost(call, name, Format("packed", 2), ranks, MANY)


def check_what_is_lost(call, name, format, ranks, count) -> None:
    """All ranks have the same bits, and with what they lost and dropped, the exact sum."""
    given = streams_at(anywhere(ranks, SIZE, count), SIZE)
    for rank, stream in enumerate(given):
        generator = torch.Generator().manual_seed(rank)
        stream.values = torch.randn(stream.nnz, generator=generator)

    def on_rank(comm):
        wire = Wire(comm, format)
        result, dropped = parts(call(given[comm.rank], wire))
        lost = [one.placed(start, SIZE).to_dense() for start, one in wire.take_lost()]
        assert not wire.take_lost()
        return result, sum(lost, dropped)

    results = simulate(ranks, on_rank).results
    kept = sum(lost.double() for _, lost in results)
    exact = sum(stream.to_dense().double() for stream in given)
    totals = [result.to_dense() for result, _ in results]
    if name == "reduce_scatter":
        total = torch.cat(totals)
    elif name in OTHERS:  # the last rank's stream
        total, exact = totals[0], given[-1].to_dense().double()
        kept = results[-1][1].double()
    else:
        total = totals[0]
    if name != "reduce_scatter":
        assert all(torch.equal(one, totals[0]) for one in totals)
    torch.testing.assert_close(total + kept, exact, rtol=1e-5, atol=1e-5)


def parts(outcome):
    """Return a result and what this rank dropped, densely."""
    if isinstance(outcome, SparseStream):
        return outcome, torch.zeros(SIZE)
    return outcome.total, outcome.dropped.to_dense()
