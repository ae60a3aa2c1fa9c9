"""all_gather, reduce_scatter, broadcast, gtopk and rounded sums, on the simulated cluster."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream, simulate
from sparcel.core.collectives import ALGORITHMS, gtopk
from sparcel.core.formats import FewBits, Format
from sparcel.core.stream import dense_from, reduce
from sparcel.core.wire import Wire
from sparcel.errors import CommunicationError, InputError
from tests.strategies import (
    FLOATS,
    LAYOUTS,
    SUM,
    case_of,
    cases,
    check_stored,
    dense_reference,
    floats,
    full,
    layouts,
    make_stream,
    parts_of,
    same_bits,
    same_stream,
    sizes,
    stored_by,
    worlds,
)


@given(cases())
def test_all_gather_gives_every_rank_all_streams_unchanged(case):
    results = simulate(
        case.world, lambda comm: sparcel.all_gather(case.streams[comm.rank], group=comm)
    ).results
    for gathered in results:
        assert len(gathered) == case.world
        assert all(map(same_stream, gathered, case.streams))


def test_all_gather_keeps_each_ranks_flag():
    case = case_of("random", 5, 30)
    case.streams[3].finite = False
    for gathered in simulate(
        5, lambda comm: sparcel.all_gather(case.streams[comm.rank], group=comm)
    ).results:
        assert [stream.finite for stream in gathered] == [True, True, True, False, True]


@given(cases())
def test_reduce_scatter_gives_each_rank_its_region_of_the_sum(case):
    before = [parts_of(stream) for stream in case.streams]
    results = simulate(
        case.world,
        lambda comm: sparcel.reduce_scatter(case.streams[comm.rank], case.op, group=comm),
    ).results
    whole, stored = dense_reference(case.streams, case.op), stored_by(case.streams)
    for rank, region in enumerate(results):
        start, stop = (r * case.size // case.world for r in (rank, rank + 1))
        assert region.size == stop - start
        assert torch.equal(full(region, case.op), whole[start:stop])
        if region.size:
            here = stored[(stored >= start) & (stored < stop)] - start
            check_stored(region, here, dense_from(region.size, region.value_bytes))
    for stream, (indices, values, _, _) in zip(case.streams, before, strict=True):
        assert same_bits(stream.indices, indices)
        assert same_bits(stream.values, values)


@given(cases(), st.data(), st.booleans())
def test_broadcast_gives_every_rank_the_roots_stream_unchanged(case, data, finite):
    root = data.draw(st.integers(0, case.world - 1))
    case.streams[root].finite = finite

    def on_rank(comm):
        stream = case.streams[root] if comm.rank == root else None
        return sparcel.broadcast(stream, root, group=comm)

    for result in simulate(case.world, on_rank).results:
        assert same_stream(result, case.streams[root])


@pytest.mark.parametrize("root", [-1, 3])
def test_broadcast_refuses_a_root_that_is_not_a_rank(root):
    with pytest.raises(InputError, match=rf"root must be a rank in \[0, 3\), got {root}"):
        simulate(3, lambda comm: sparcel.broadcast(make_stream([1], 0, 9), root, group=comm))


def test_broadcast_refuses_a_root_without_a_stream():
    with pytest.raises(InputError, match="rank 1 is the root and must pass a stream, got None"):
        simulate(3, lambda comm: sparcel.broadcast(None, 1, group=comm))


def test_others_do_not_wait_for_a_root_without_a_stream():
    def on_rank(comm):
        kind = InputError if comm.rank == 1 else CommunicationError
        with pytest.raises(kind, match="rank 1 is the root and must pass a stream"):
            sparcel.broadcast(None, 1, group=comm)

    simulate(3, on_rank)


def largest(vector, k):
    """Split a vector into its k largest magnitudes, ties to the lowest index, and the rest."""
    ranking = sorted(range(len(vector)), key=lambda i: (-abs(float(vector[i])), i))
    kept = torch.zeros_like(vector)
    kept[ranking[:k]] = vector[ranking[:k]]
    return kept, vector - kept


def tree(vectors, k):
    """Reduce dense vectors by the pairwise tree of ⊤; return the total and each rank's drops."""
    vectors = [vector.double() for vector in vectors]
    dropped = []
    for rank, vector in enumerate(vectors):
        vectors[rank], rest = largest(vector, k)
        dropped.append(rest)
    distance = 1
    while distance < len(vectors):
        for rank in range(0, len(vectors) - distance, 2 * distance):
            both = vectors[rank] + vectors[rank + distance]
            vectors[rank], rest = largest(both, k)
            dropped[rank] += rest
        distance *= 2
    return vectors[0], dropped


def run_gtopk(case, k):
    return simulate(case.world, lambda comm: gtopk(case.streams[comm.rank], Wire(comm), k)).results


@given(layouts, worlds, sizes, floats, st.integers(1, 12), st.integers(0, 99))
def test_gtopk_is_the_tree_of_pairwise_selections(layout, world, size, dtype, k, seed):
    case = case_of(layout, world, size, dtype, count=k, seed=seed)
    total, dropped = tree([full(stream) for stream in case.streams], k)
    results = run_gtopk(case, k)
    for rank, outcome in enumerate(results):
        assert not outcome.total.is_dense
        assert outcome.total.nnz <= k
        assert same_stream(outcome.total, results[0].total)
        assert torch.equal(full(outcome.total).double(), total)
        assert torch.equal(full(outcome.dropped).double(), dropped[rank])
    # The total and the dropped sums add up to the sum of all inputs.
    kept = sum(full(outcome.dropped).double() for outcome in results) + total
    assert torch.equal(kept, sum(full(stream).double() for stream in case.streams))


@given(st.integers(1, 2), sizes, st.integers(1, 12), st.integers(0, 99))
def test_gtopk_of_one_or_two_ranks_is_the_topk_of_the_sum(world, size, k, seed):
    case = case_of("random", world, size, count=k, seed=seed)
    oracle, _ = largest(dense_reference(case.streams, SUM), k)
    for outcome in run_gtopk(case, k):
        assert torch.equal(full(outcome.total), oracle)


@pytest.mark.parametrize("world", range(1, 10))
def test_gtopk_passes_on_the_flag_of_any_rank(world):
    for culprit in range(world):
        case = case_of("random", world, 40, count=4)
        case.streams[culprit].finite = False
        assert not any(outcome.total.finite for outcome in run_gtopk(case, 4))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_gtopk_marks_an_overflowing_sum_as_not_finite(world):
    stream = SparseStream(torch.arange(4), torch.full((4,), 3e38), 20)
    for outcome in simulate(world, lambda comm: gtopk(stream, Wire(comm), 2)).results:
        assert not outcome.total.finite


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_gtopk_refuses_integers(dtype):
    with pytest.raises(InputError, match="scalar float values"):
        run_gtopk(case_of("random", 2, 20, dtype), 3)


SPLIT = ALGORITHMS["split_allgather"]


def rounded(streams, format, max_nnz=None):
    """Return each rank's sum by split and all-gather, and what it lost, over the whole vector."""

    def on_rank(comm):
        own, wire = streams[comm.rank], Wire(comm, format)
        total = SPLIT(own, wire, SUM, max_nnz)
        lost = [one.placed(start, own.size) for start, one in wire.take_lost()]
        return total, reduce([own.empty_like(), *lost])

    return simulate(len(streams), on_rank).results


@given(
    st.sampled_from(LAYOUTS),
    worlds,
    sizes,
    st.sampled_from(FLOATS[2:]),
    st.sampled_from(["raw", "packed"]),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
)
def test_rounded_sum_plus_all_that_was_lost_is_the_exact_sum(
    layout, world, size, dtype, indices, bits, bounded
):
    case = case_of(layout, world, size, dtype, count=max(1, size // 2))
    format = Format(indices, bits)
    results = rounded(case.streams, format, case.max_nnz if bounded else None)
    sums = full(results[0][0]).double().clone()
    for total, lost in results:
        assert same_stream(total, results[0][0])
        sums += full(lost)
    exact = dense_reference(case.streams, SUM).double()
    torch.testing.assert_close(sums, exact, rtol=1e-5, atol=1e-5)


def test_sparse_values_are_rounded_where_they_travel_and_stay_sparse():
    """A rank loses nothing of its own values in its own region, and the owner rounds the sum."""
    world, size, indices = 4, 4000, torch.arange(0, 4000, 25)
    draw = torch.Generator().manual_seed(1)
    streams = [SparseStream(indices, torch.randn(160, generator=draw), size) for _ in range(world)]
    results = rounded(streams, Format("raw", FewBits(2, 64, "float32", stochastic=True)))
    for rank, (total, lost) in enumerate(results):
        assert torch.equal(total.indices, indices)
        cuts = range(0, 4001, 1000)
        scales = {float(part.values.abs().max()) for part in total.split(cuts)}
        assert set(total.values.abs().tolist()) <= {0.0, *scales}
        given_up = full(lost).split(1000)
        for owner, (part, sent) in enumerate(zip(given_up, streams[rank].split(cuts), strict=True)):
            assert sent.values.numel() == 40  # less than a block, so one scale
            shares = (sent.values - part[sent.indices.long()]).abs()
            shares = (shares / sent.values.abs().max()).round(decimals=5)
            assert (set(shares.tolist()) <= {0.0, 1.0}) == (owner != rank)


def test_ranks_with_the_same_values_round_them_each_in_another_way():
    stream = SparseStream(None, torch.linspace(0.01, 1, 600), 600)
    by = Format("raw", FewBits(4, stochastic=True))
    lost = [full(lost) for _, lost in rounded([stream] * 3, by)]
    assert not torch.equal(lost[0][400:], lost[1][400:])
    assert not torch.equal(lost[1][:200], lost[2][:200])


@pytest.mark.parametrize("world", [2, 3, 8])
def test_overflowing_rounded_sum_is_not_finite_on_any_rank(world):
    stream = SparseStream(None, torch.full((24,), 3e38), 24)
    for total, lost in rounded([stream] * world, Format("raw", 4)):
        assert not total.finite
        assert bool(full(lost).isfinite().all())
