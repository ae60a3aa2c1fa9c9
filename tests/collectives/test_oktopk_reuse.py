"""Ok-Topk with estimates of earlier steps keeps what they let win, on the simulated cluster."""

from itertools import pairwise

import torch
from hypothesis import given

from sparcel import SparseStream, simulate
from sparcel.core.collectives import Estimates, oktopk_reuse
from sparcel.core.wire import Wire
from tests.collectives.test_oktopk import CASES, oracle, streams_of
from tests.strategies import full, same_bits, same_stream


def reuse(streams, k, estimates, boundaries=False, threshold=False, max_nnz=None):
    """Return the total and the estimates, the same on all ranks."""

    def on_rank(comm):
        stream = streams[comm.rank]
        return oktopk_reuse(stream, Wire(comm), k, estimates, boundaries, threshold, max_nnz)

    found = simulate(len(streams), on_rank).results
    results = [(outcome.total, learnt) for outcome, learnt in found]
    assert all(same_stream(total, results[0][0]) for total, _ in results)
    assert all(learnt == results[0][1] for _, learnt in results)
    return results[0]


UNKNOWN = Estimates(None, None)


@given(*CASES)
def test_reused_threshold_keeps_the_largest_sums_above_it(
    layout, kind, world, size, count, k, dtype, seed
):
    first = streams_of(layout, kind, world, size, count, dtype, seed)
    total, estimates = reuse(first, k, UNKNOWN, max_nnz=count)
    assert same_stream(total, oracle(first, k))  # unknown estimates are computed exactly
    bounds = estimates.boundaries
    assert list(bounds) == sorted(bounds)
    assert (len(bounds), bounds[0], bounds[-1]) == (world + 1, 0, size)

    later = streams_of(layout, kind, world, size, count, dtype, seed + 1)
    total, kept = reuse(later, k, estimates, max_nnz=count)
    assert kept == estimates
    every = full(oracle(later, size))
    above = (every.abs() >= estimates.threshold) & (every != 0)
    assert total.nnz == min(int(above.sum()), -(-4 * k // 3))
    indices = total.indices.long()
    assert same_bits(total.values, every[indices])
    assert bool(above[indices].all())
    for start, stop in pairwise(bounds):  # the largest of each region win
        won = total.slice(start, stop)
        assert same_stream(
            won, SparseStream.unchecked(None, every[start:stop], stop - start).topk(won.nnz)[0]
        )


def test_estimates_are_renewed_on_request_or_if_they_do_not_fit():
    old = Estimates((0, 1, 2, 100), 1.5, 10)
    streams = streams_of("uniform", "normal", 3, 100, 30)
    _, same = reuse(streams, 10, old)
    assert same == old
    _, edges = reuse(streams, 10, old, boundaries=True)
    assert edges.boundaries != old.boundaries
    assert edges.threshold == 1.5
    total, limit = reuse(streams, 10, old, threshold=True)
    assert limit.boundaries == old.boundaries
    assert limit.threshold == float(total.values.abs().min())
    for unfit in ((0, 1, 100), (0, 1, 2, 99)):
        _, fitting = reuse(streams, 10, Estimates(unfit, 1.5, 10))
        assert fitting == edges
    total, other = reuse(streams, 7, old)  # estimated for another k
    assert (total.nnz, other.boundaries, other.k) == (7, old.boundaries, 7)


def test_boundaries_are_averaged_in_integers():
    size = 2**40 + 3
    streams = [
        SparseStream(size - 40 + torch.arange(8) + rank, torch.ones(8), size) for rank in (0, 1)
    ]
    _, estimates = reuse(streams, 4, UNKNOWN)
    assert estimates.boundaries == (0, size - 36, size)  # of size − 36 and size − 35, rounded down


def test_estimates_stay_unchanged_if_the_sum_is_not_finite():
    old = Estimates((0, 50, 80, 100), 1.5, 10)
    for renew in (False, True):
        for poison in ("flag", float("nan"), float("inf")):
            streams = streams_of("uniform", "normal", 3, 100, 30)
            if poison == "flag":
                streams[1].finite = False
            else:
                streams[1].values[3] = poison
            total, estimates = reuse(streams, 10, old, renew, renew)
            assert not total.finite
            assert total.nnz == 0
            assert estimates == old
