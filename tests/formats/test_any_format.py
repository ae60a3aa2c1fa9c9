"""Collectives, schemes and costs work with any format, also if sparcel does not contain it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, scheme, simulate
from sparcel.collectives import (
    ALGORITHMS,
    OTHER_STAGES,
    Estimates,
    all_gather,
    broadcast,
    gathered_topk,
    gtopk,
    oktopk,
    oktopk_reuse,
    quantized_split_allgather,
    reduce_scatter,
)
from sparcel.collectives.oktopk import topk_by_regions
from sparcel.cost import Problem
from sparcel.cost import count as count_of
from sparcel.errors import InputError
from sparcel.formats import COO, Packed, Qsgd, decode
from sparcel.ops import MAX, SUM
from sparcel.schemes import ON_NODES, SCHEMES, Request
from sparcel.stages import most_bytes
from sparcel.wire import Wire
from tests.cost.test_traffic import anywhere, evenly, streams_at, union_of
from tests.formats.toys import Bytes, Deltas
from tests.sampling import meeting
from tests.strategies import same_stream, streams

TOYS = [Deltas(), Bytes(), Packed()]
FIXED_LENGTH = [Deltas(), Packed()]
WORLDS = range(1, 10)
SIZE, K = 9001, 300

REDUCTIONS = {
    name: lambda stream, wire, algorithm=algorithm: algorithm.reduce(stream, wire, SUM, K)
    for name, algorithm in ALGORITHMS.items()
}
SELECTIONS = {
    "gtopk": lambda stream, wire: gtopk(stream, wire, K).total,
    "gathered_topk": lambda stream, wire: gathered_topk(stream, wire, K, K).total,
    "oktopk": lambda stream, wire: oktopk(stream, wire, K, K).total,
    "by regions": lambda stream, wire: topk_by_regions(stream, wire, K, K).total,
    "oktopk_reuse": lambda stream, wire: (
        oktopk_reuse(stream, wire, K, Estimates(), True, True, K)[0].total
    ),
}
OTHERS = {
    "reduce_scatter": lambda stream, wire: reduce_scatter(stream, wire, SUM, K),
    "all_gather": lambda stream, wire: all_gather(stream, wire)[-1],
    "broadcast": lambda stream, wire: broadcast(stream, wire, wire.size - 1),
}
COLLECTIVES = REDUCTIONS | SELECTIONS | OTHERS
PREDICTED = {name: algorithm.stages for name, algorithm in ALGORITHMS.items()} | OTHER_STAGES


def run(call, given, format):
    return simulate(len(given), lambda comm: call(given[comm.rank], Wire(comm, format)))


@pytest.mark.parametrize(("name", "kind"), meeting(COLLECTIVES, product(TOYS, WORLDS), each=9))
def test_every_collective_has_the_same_bits_as_with_coo(name, kind) -> None:
    format, ranks = kind
    given = streams_at(anywhere(ranks, SIZE, K), SIZE)
    plain, other = (run(COLLECTIVES[name], given, f).results for f in (COO, format))
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(one.to_dense(), two.to_dense())


@pytest.mark.parametrize("format", TOYS, ids=lambda toy: type(toy).__name__)
def test_other_operations_rows_and_integers_work_with_any_format(format) -> None:
    for ranks in (1, 3, 9):
        rows = [
            SparseStream(at, torch.stack((at, at + rank), dim=1).int(), SIZE)
            for rank, at in enumerate(anywhere(ranks, SIZE, 40))
        ]
        for name, algorithm in ALGORITHMS.items():
            call = lambda s, wire, a=algorithm: a.reduce(s, wire, MAX, None)  # noqa: E731
            plain, other = (run(call, rows, f).results[0] for f in (COO, format))
            fill = MAX.neutral_for(torch.int32)
            assert torch.equal(plain.to_dense(fill), other.to_dense(fill)), name


@pytest.mark.parametrize(
    ("name", "kind"),
    meeting(
        [name for name in COLLECTIVES if name in PREDICTED],
        product(FIXED_LENGTH, WORLDS, ["identical", "disjoint"]),
        each=12,
    ),
)
def test_bytes_of_a_fixed_length_format_are_predicted_exactly(name, kind) -> None:
    format, ranks, layout = kind
    indices = evenly(layout, ranks, SIZE, K)
    call = (
        COLLECTIVES[name]
        if name != "broadcast"
        else lambda stream, wire: broadcast(stream, wire, 0)
    )
    if name == "oktopk" and ranks > 2:
        return  # its bytes do not depend on the indices alone: see tests/cost
    traffic = run(call, streams_at(indices, SIZE), format).traffic
    problem = Problem(SIZE, K, ranks, format=format, union=union_of(indices, SIZE))
    for rank in range(ranks):
        told = count_of(PREDICTED[name], replace(problem, rank=rank))
        assert (told.bytes_sent, told.bytes_received) == (
            traffic[rank].bytes_sent,
            traffic[rank].bytes_received,
        )


@pytest.mark.parametrize(("name", "kind"), meeting(SCHEMES, product(TOYS, WORLDS), each=6))
def test_every_scheme_has_the_same_updates_as_with_coo(name, kind) -> None:
    format, ranks = kind
    here = next(count for count in (2, 3, 1) if ranks % count == 0)
    settings = {"corrected": False} if name == "auto" else {}
    if name in ON_NODES:
        settings = {"ranks_per_node": here}
    draw = torch.Generator().manual_seed(ranks)
    gradients = torch.randint(-8, 9, (ranks, 2, 2500), generator=draw).float()

    def two_steps(comm, format):
        made = scheme(name, **settings)
        request = Request(format=format)
        return [made.step(own, comm, request=request) for own in gradients[comm.rank]]

    plain, other = (
        simulate(ranks, lambda comm, f=f: two_steps(comm, f)).results for f in (COO, format)
    )
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(torch.stack(one), torch.stack(two))


@pytest.mark.parametrize("format", TOYS, ids=lambda toy: type(toy).__name__)
@given(stream=streams())
def test_no_message_is_longer_than_max_bytes(format, stream) -> None:
    compact = stream.compact(dense_at=format.dense_from(stream.size, stream.value_bytes))
    message = format.encode(compact).message
    assert same_stream(decode(message, stream, format), compact)
    nnz = None if compact.is_dense else compact.nnz
    assert message.numel() <= format.max_bytes(nnz, stream.size, stream.value_bytes)
    assert message.numel() <= most_bytes(format, stream.nnz, stream.size, stream.value_bytes)


@given(st.integers(1, 2000), st.integers(0, 99))
def test_data_dependent_length_is_predicted_within_its_spread(k, seed) -> None:
    """Each of k distances takes 1, 2 or 3 bytes, so the length's deviation is at most √k bytes.

    Indices are drawn without repetition, so their distances vary less than independent ones.
    Padding adds half a unit on average. The prediction assumes an endless vector, but the distances
    here lie in a finite one.
    """
    size = 50_000
    [stream] = streams_at(anywhere(1, size, k, seed), size)
    length = Bytes().encode(stream).message.numel()
    assert abs(length - Bytes().expected_bytes(k, size, 4)) <= 6 * sqrt(k) + 8


def test_lossy_format_is_refused_if_its_error_would_be_ignored() -> None:
    whole = SparseStream(None, torch.arange(16.0), 16)
    with pytest.raises(InputError, match="loses a part of what it encodes"):
        run(REDUCTIONS["allgather"], [whole, whole], Qsgd(bits=4))


def test_lossy_format_returns_its_error() -> None:
    stream = SparseStream(None, torch.randn(100, generator=torch.Generator().manual_seed(1)), 100)
    message, error = Qsgd(bits=4).encode(stream)
    assert error is not None
    assert torch.allclose(decode(message).values + error.values, stream.values, rtol=0, atol=1e-6)
    assert error.values.count_nonzero() > 50
    sparse = stream.largest(10)
    assert torch.equal(Qsgd(bits=4).encode(sparse).error.indices, sparse.indices)
    assert Qsgd(bits=4).encode(stream.largest(3)).error is None  # it saves nothing


@pytest.mark.parametrize(
    ("ranks", "kind"),
    meeting(WORLDS, product([30, K, 3000], ["identical", "disjoint"], [2, 4, 8]), each=6),
)
def test_quantised_bytes_are_those_that_the_format_tells(ranks, kind) -> None:
    """Of both phases, on every rank, sparse or dense; none is longer than an exact message."""
    count, layout, bits = kind
    count = min(count, SIZE // ranks)
    indices, quantizer = evenly(layout, ranks, SIZE, count), Qsgd(bits)
    given, call = streams_at(indices, SIZE), ALGORITHMS["split_allgather"]
    narrow = run(lambda s, wire: quantized_split_allgather(s, wire, quantizer), given, COO)
    plain = run(lambda s, wire: call.reduce(s, wire, SUM, None), given, COO).traffic
    problem = Problem(SIZE, count, ranks, format=quantizer, union=union_of(indices, SIZE))
    for rank, traffic in enumerate(narrow.traffic):
        told = count_of(call.stages, replace(problem, rank=rank))
        assert (told.bytes_sent, told.bytes_received) == (
            traffic.bytes_sent,
            traffic.bytes_received,
        )
        assert traffic.volume < plain[rank].volume or count // ranks <= 3 or ranks == 1
