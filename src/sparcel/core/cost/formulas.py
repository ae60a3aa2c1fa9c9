"""What each collective costs: one formula each, as in the tables of the papers.

A formula yields what rank 0 sends, receives and computes, in expectation: of P ranks with k of n
coordinates each, Q is the largest power of two up to P, and F = P − Q ranks are beyond it. Bytes
and rounds are near those that the algorithms have, as `tests/cost/test_traffic.py` says; the times
of work were fitted to measured ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, sqrt

from sparcel.core import patterns
from sparcel.core.collectives.broadcast import LENGTH_BYTES, goes_whole
from sparcel.core.collectives.counting import (
    FEW_RANKS,
    TOLERANCE,
    TOLERATED,
    edges_for,
    few,
    histogram_bits,
)
from sparcel.core.collectives.oktopk import gathering_is_cheaper
from sparcel.core.comm import DIRECT_RANKS
from sparcel.core.cost.predict import (
    EngineSum,
    Exchange,
    Fastest,
    Formula,
    Problem,
    Term,
    Work,
    choose,
)
from sparcel.core.formats import RAW
from sparcel.core.rates import Rates
from sparcel.core.wire import goes_direct

Terms = Iterator[Term]

# Work, in units of what is measured: fitted to measured times.


def copied(entries: float, busy: float = 1.0, times: float = 1) -> Work:
    """Return the work of decoding, cutting or joining messages and streams of so many entries.

    It is that of encoding two entries of 8 bytes.
    """
    return Work("encode", 16 * entries, busy, times)


def chosen(entries: float, busy: float = 1.0) -> Work:
    """Return the work of taking the largest out of so many entries, which takes 8 passes."""
    return Work("select", 8 * entries, busy)


def scattered(entries: float) -> Work:
    """Return the work of adding entries to a dense vector: twice that of merging as many."""
    return Work("merge", 2 * entries)


ROUND = Work("small", 12)
"""A round's small operations, beside the work on its message."""

_COUNTING = Work("small", 1000)
"""Small operations on counts: to find boundaries, to share out winners, and to compare costs."""

_OCTAVES = 5
"""Octaves in which sums are assumed to lie."""


# Parts of several algorithms.


def gather(
    ranks: int, nbytes: float, at_most: float | None = None, inside: bool = False
) -> Iterator[Exchange]:
    """Yield the messages of `Wire.gather`: (P − 1) · b bytes, in P − 1 or ⌈log₂P⌉ rounds."""
    if ranks > 1 and goes_direct(ranks, nbytes if at_most is None else at_most):
        yield Exchange("gather", nbytes, nbytes, ranks - 1, inside=inside)
    elif ranks > 1:
        for _, _, distance, blocks in patterns.bruck(0, ranks):
            yield Exchange("shift", blocks * nbytes, blocks * nbytes, 1, distance, inside)


def _swap(p: Problem, distance: int, sent: float, received: float) -> Exchange:
    """Return the exchange of two partners."""
    return Exchange("shift", sent, received, 1, distance, distance < p.ranks_per_node)


def _beyond(p: Problem) -> tuple[int, int]:
    """Return Q and F."""
    powers = patterns.fold(0, p.ranks).powers
    return powers, p.ranks - powers


def _fold(p: Problem) -> Terms:
    """Yield how the ranks beyond Q hand their streams to partners."""
    powers, folded = _beyond(p)
    if folded:
        busy = folded / p.ranks
        yield Work("encode", p.part(1, 1), busy)
        yield Exchange("tree", None, p.part(1, 1), 1, powers)
        yield Work("merge", 2 * p.k, busy)


def _unfold(p: Problem, nbytes: float) -> Terms:
    """Yield how they get the result."""
    powers, folded = _beyond(p)
    if folded:
        yield Work("encode", nbytes, folded / p.ranks)
        yield Exchange("tree", nbytes, None, 1, powers)


def _to_owners(p: Problem) -> Terms:
    """Yield how ranks send owners their slices: P − 1 messages of k / P entries."""
    if p.ranks > 1:
        piece = p.part(1, p.ranks)
        yield copied(p.k)
        yield Work("encode", piece, times=p.ranks)
        yield Exchange("rotate", piece, piece, p.ranks - 1)
    yield Work("merge", 2 * p.k)


def _made_dense(p: Problem, entries: float, size: float) -> Terms:
    """Yield the work of making a sum dense, where it is smaller so."""
    if p.lengths.is_dense(entries, round(size)):
        yield Work("add", size)
        yield scattered(entries)


def down_tree(ranks: int, nbytes: float) -> Iterator[Exchange]:
    """Yield a broadcast: ⌈log₂P⌉ whole messages, or parts down a tree and a gather of them."""
    whole = goes_whole(ranks, nbytes)
    for *_, distance, blocks in patterns.binomial_tree(0, ranks):
        yield Exchange("tree", nbytes if whole else blocks * nbytes / ranks, None, 1, distance)
    for *_, distance, blocks in () if whole else patterns.bruck(0, ranks):
        part = blocks * nbytes / ranks
        yield Exchange("shift", part, part, 1, distance)


def agreement(p: Problem) -> Terms:
    """Yield a comparison of headers."""
    yield from gather(p.ranks, p.lengths.sparse_message(0), p.lengths.most_bytes(0))
    yield copied(0, times=p.ranks)


# All-reduces of streams.


def dense(p: Problem) -> Terms:
    """2n(P − 1)/P by the engine, after a comparison of headers."""
    yield from agreement(p)
    yield Work("add", p.size)
    if not p.lengths.is_dense(p.k):
        yield scattered(p.k)
    yield EngineSum(p.size, p.itemsize, p.ranks)


def allgather(p: Problem) -> Terms:
    """k(P − 1)."""
    yield Work("encode", p.message(1))
    yield from gather(p.ranks, p.message(1), p.lengths.most_bytes(p.k))
    yield Work("merge", 2 * p.ranks * p.k)
    yield from _made_dense(p, p.union(p.ranks), p.size)


def recursive_doubling(p: Problem) -> Terms:
    """Σ over log₂Q rounds of the sum of 1, 2, 4, … ranks' streams, and the folding."""
    powers, folded = _beyond(p)
    yield from _fold(p)
    for *_, distance, _ in patterns.doubling(0, powers):
        held = distance + min(folded, distance)
        other = distance + min(max(folded - distance, 0), distance)
        yield ROUND
        yield Work("encode", p.message(held))
        yield _swap(p, distance, p.message(held), p.message(other))
        if p.lengths.is_dense(p.union(held)):
            yield Work("add", p.size)
        else:
            yield Work("merge", p.union(held) + p.union(other))
            yield from _made_dense(p, p.union(held + other), p.size)
    yield from _unfold(p, p.message(p.ranks))


def halving_doubling(p: Problem) -> Terms:
    """Σ over log₂Q rounds of 1/2, 1/4, … of partial sums, then of 1/Q, 2/Q, … of the result."""
    powers, folded = _beyond(p)
    yield from _fold(p)
    yield copied(p.k)
    for *_, distance, _ in patterns.halving(0, powers):
        parts, apart = powers // distance, 2 * distance
        held, other = (parts // 2 + ceil(max(folded - first, 0) / apart) for first in (0, distance))
        yield replace(ROUND, times=2)  # the halves are cut out first
        yield Work("encode", p.part(held, parts))
        yield _swap(p, distance, p.part(held, parts), p.part(other, parts))
        yield copied(p.union(other) / parts)
        yield Work("merge", (p.union(held) + p.union(other)) / parts)
    result, region = p.union(p.ranks), p.part(p.ranks, powers)
    for *_, distance, _ in patterns.doubling(0, powers):
        yield ROUND
        yield _swap(p, distance, distance * region, distance * region)
        yield copied(distance * result / powers)
    yield Work("encode", region)
    yield copied(result)
    yield from _unfold(p, powers * region)


def split_allgather(p: Problem) -> Terms:
    """k(P − 1)/P, then K(P − 1)/P of the result."""
    result, region = p.union(p.ranks), p.part(p.ranks, p.ranks)
    yield from _to_owners(p)
    yield Work("encode", region)
    most = p.lengths.most_bytes(p.k * p.ranks, ceil(p.size / p.ranks))
    yield from gather(p.ranks, region, most)
    yield copied(result / p.ranks, times=p.ranks)
    yield copied(result)


def ring(p: Problem) -> Terms:
    """Σ over P − 1 steps of 1/P of the sum of 1, 2, 3, … streams, then of the result."""
    yield copied(p.k)
    for streams in [*range(1, p.ranks), *[p.ranks] * (p.ranks - 1)]:
        entries, nbytes = p.union(streams) / p.ranks, p.part(streams, p.ranks)
        yield Work("encode", nbytes)
        yield Exchange("shift", nbytes, nbytes)
        yield copied(entries)
        if streams < p.ranks:
            yield Work("merge", entries + p.k / p.ranks)
    yield copied(p.union(p.ranks))


# Other collectives.


def all_gather(p: Problem) -> Terms:
    """k(P − 1)."""
    nbytes = p.lengths.sparse_message(p.k)
    yield Work("encode", nbytes)
    yield from gather(p.ranks, nbytes, p.lengths.sparse_message(p.size))
    yield copied(p.k, times=p.ranks)


def reduce_scatter(p: Problem) -> Terms:
    """k(P − 1)/P."""
    yield from _to_owners(p)
    yield from _made_dense(p, p.union(p.ranks) / p.ranks, p.size / p.ranks)


def broadcast(p: Problem) -> Terms:
    """2k(P − 1)/P, of the root, after a comparison of lengths."""
    nbytes = p.lengths.sparse_message(p.k)
    yield Work("encode", nbytes, 1 / p.ranks)
    for *_, distance, _ in patterns.bruck(0, p.ranks):
        yield Exchange("shift", LENGTH_BYTES, LENGTH_BYTES, 1, distance)
    yield from down_tree(p.ranks, nbytes)
    yield copied(p.k)


def gtopk(p: Problem) -> Terms:
    """k⌈log₂P⌉ up a tree, and as much down."""
    nbytes, levels = p.message(1), (p.ranks - 1).bit_length()
    yield chosen(0)  # mostly, all entries are selected
    for distance in (1 << level for level in range(levels)):
        busy = 0.5 / distance
        yield ROUND
        yield Work("encode", nbytes, busy)
        yield Exchange("tree", None, nbytes, 1, distance)
        yield copied(p.k, busy)
        yield Work("merge", 2 * p.k, busy)
        yield chosen(p.union(2), busy)
    yield Work("encode", nbytes, 1 / p.ranks)
    for *_, distance, _ in patterns.binomial_tree(0, p.ranks):
        yield Exchange("tree", nbytes, None, 1, distance)
    yield copied(p.k)
    yield Work("merge", levels * p.k, 0.5)


def gathered_topk(p: Problem) -> Terms:
    """k(P − 1)."""
    yield from allgather(p)
    yield chosen(p.union(p.ranks))
    yield Work("select", p.union(p.ranks) / p.ranks)


def oktopk(p: Problem) -> Terms:
    """2k(P − 1)/P and counts, or a gather of everything where that is no more."""
    if gathering_is_cheaper(p.lengths, p.ranks, p.k, p.k):
        yield from gathered_topk(p)
        return
    reduced, won = p.union(p.ranks) / p.ranks, p.k / p.ranks
    yield _COUNTING
    yield from _boundaries(p)
    yield from _to_owners(p)
    yield from _threshold(p)
    yield chosen(reduced)
    yield Work("select", reduced)
    block = p.lengths.region_message(won, round(p.size / p.ranks))
    yield Work("encode", block)
    yield from gather(p.ranks, block)
    yield copied(won, times=p.ranks)


def _boundaries(p: Problem) -> Terms:
    """Yield the sums of counts by which regions are balanced."""
    cuts = edges_for(p.ranks)
    inside = p.ranks * p.k / cuts
    yield from _counts(p, cuts, cuts, p.ranks * p.k)
    # Assume that some boundary's cell is two standard deviations above the average.
    while p.ranks > 1 and inside + 2 * sqrt(inside) > max(p.ranks, TOLERANCE, p.k // TOLERATED):
        parts = cuts // (p.ranks - 1)
        edges = (p.ranks - 1) * (parts - 1)
        yield from _counts(p, edges, edges, p.ranks * p.k)
        inside /= parts


def _threshold(p: Problem) -> Terms:
    """Yield the histograms that find the k-th largest sum, and a gather of what is near it."""
    first, more = histogram_bits(p.ranks)
    bins = _OCTAVES << (first - 8)
    yield Work("select", p.union(p.ranks) / p.ranks)
    yield from _counts(p, 1 << first, bins, p.size)
    inside = p.union(p.ranks) / bins
    while inside > few(p.ranks):
        bins, own = 1 << more, inside / p.ranks
        # Few ranks send all counts from the first nonzero one to the last.
        occupied = bins * own / (own + 2) if p.ranks <= DIRECT_RANKS else min(bins, own)
        yield Work("select", p.k / p.ranks)
        yield from _counts(p, bins, occupied, p.size)
        inside /= bins
    listed = 2 + round(inside / p.ranks)
    if p.ranks <= DIRECT_RANKS:
        yield ROUND
        yield from gather(p.ranks, 4 * (1 + listed))
    else:
        nbytes = RAW.nbytes(None, listed, 4)
        yield Work("encode", nbytes)
        yield from gather(p.ranks, nbytes)
        yield copied(0, times=p.ranks)


def _counts(p: Problem, size: int, nonzero: float, limit: int) -> Terms:
    """Yield a sum of counts, of which the same ``nonzero`` consecutive ones are, on all ranks."""
    itemsize, nonzero = 4 if limit < 1 << 31 else 8, min(max(1, round(nonzero)), size)
    if p.ranks <= DIRECT_RANKS:
        yield ROUND
        yield from gather(p.ranks, (3 + nonzero) * itemsize)
        return
    add = recursive_doubling if p.ranks <= FEW_RANKS else halving_doubling
    yield from add(Problem(size, nonzero, p.ranks, p.ranks_per_node, itemsize, nonzero))


SUMS: Mapping[str, Formula] = {
    "dense": dense,
    "allgather": allgather,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "split_allgather": split_allgather,
    "ring": ring,
}
"""Of the algorithms of `sparcel.all_reduce`, by name."""

COLLECTIVES: Mapping[str, Formula] = {
    **SUMS,
    "gtopk": gtopk,
    "gathered_topk": gathered_topk,
    "oktopk": oktopk,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
}
"""Of all collectives, by name."""

_WITHOUT_ENGINE = {name: formula for name, formula in SUMS.items() if name != "dense"}


def fastest_sum(p: Problem) -> Terms:
    """Yield the fastest all-reduce; the engine's sum does not travel in a format that loses."""
    yield Fastest(_WITHOUT_ENGINE if p.format.loses else SUMS)


def fastest(problem: Problem, rates: Rates, by_engine: bool = True) -> str:
    """Name the fastest all-reduce, as predicted; the engine's own only where ``by_engine``."""
    return choose(SUMS if by_engine else _WITHOUT_ENGINE, problem, rates)
