"""The steps of the collectives that keep the k largest."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, sqrt

from sparcel.cost.problem import Problem
from sparcel.cost.schedule import (
    DIRECT_RANKS,
    ROUND,
    allgather,
    fold,
    gather,
    merge_all,
    recursive_doubling,
    split,
)
from sparcel.cost.steps import Exchange, Step, Work
from sparcel.formats.header import HEADER_BYTES, padded

_BINS = 40
"""Bins of the first histogram that sums of selected values fall into: a few octaves of eight."""

_TOLERANCE, _TOLERATED, _FEW, _FEW_RANKS = 512, 64, 1024, 16
"""Those of the collective: entries, and part of a region, that a boundary may be off by, candidates
that are gathered at once, ranks up to which counts are summed by recursive doubling."""


_SMALL = 400
"""Operations on counts: where boundaries lie, who holds how many winners, what would be cheaper."""


def gtopk(problem: Problem) -> Iterator[Step]:
    """Return the steps of `sparcel.collectives.gtopk`, as its root takes them."""
    message = problem.message(problem.k)
    rounds = (problem.ranks - 1).bit_length()
    yield Work("topk", 0)  # all of what it is given, mostly
    for level in range(rounds):
        busy = 0.5 ** (level + 1)
        yield Work("small", ROUND)
        yield Work("encode", message, busy)
        yield Exchange("tree", message, distance=1 << level, sends=False)
        yield Work("decode", problem.k, busy)
        yield Work("merge", 2 * problem.k, busy)
        yield Work("topk", problem.union(2), busy)
    yield Work("encode", message, 1 / problem.ranks)
    for level in reversed(range(rounds)):
        yield Exchange("tree", message, distance=1 << level, receives=False)
    yield Work("decode", problem.k)
    yield Work("merge", rounds * problem.k, 0.5)


def gathered_topk(problem: Problem) -> Iterator[Step]:
    """Return the steps of `sparcel.collectives.gathered_topk`."""
    yield from allgather(problem)
    yield Work("largest", problem.union(problem.ranks))


def oktopk(problem: Problem) -> Iterator[Step]:
    """Return the steps of `sparcel.collectives.oktopk`."""
    if _gathers(problem):
        yield from gathered_topk(problem)
        return
    ranks, k = problem.ranks, problem.k
    counters = max(1024, 4 * ranks)
    yield Work("small", _SMALL)
    for counts in _boundary_sums(problem, counters):
        yield from sum_counts(problem, counts, counts)
    yield from split(problem, k / ranks)
    yield from merge_all(problem, k / ranks, problem.size / ranks)
    reduced = problem.union(ranks)
    yield Work("histogram", reduced / ranks)
    yield from sum_counts(problem, 2048, _BINS)
    inside = reduced / _BINS
    while inside > _FEW:
        yield Work("histogram", reduced / ranks)
        own = inside / ranks
        # Few ranks send what lies between the first and the last that is not zero.
        occupied = 1024 * own / (own + 2) if ranks <= DIRECT_RANKS else min(1024, own)
        yield from sum_counts(problem, 1024, occupied)
        inside /= 1024
    listed = HEADER_BYTES + 4 * (2 + inside / ranks)
    yield Work("encode", listed)
    yield from gather(problem, listed, entries=0)
    yield Work("largest", reduced / ranks)
    winners = problem.message(k / ranks)
    yield Work("encode", winners)
    yield from gather(problem, winners, k / ranks)


def sum_counts(problem: Problem, counts: int, nonzero: float) -> Iterator[Step]:
    """Return the sum of the ranks' counts, of which so many in a row are not zero."""
    nonzero = min(max(1, round(nonzero)), counts)
    if problem.ranks <= DIRECT_RANKS:
        message = HEADER_BYTES + padded(4 * (1 + nonzero))
        yield Work("encode", message)
        yield from gather(problem, message, entries=0)
        return
    # All ranks count much the same bins.
    part = Problem(counts, nonzero, problem.ranks, problem.ranks_per_node, spread=nonzero)
    if problem.ranks <= _FEW_RANKS:
        yield from recursive_doubling(part)
        return
    powers = 1 << (problem.ranks.bit_length() - 1)
    if problem.ranks > powers:
        yield from fold(part)
    for distance in (powers >> 1 + level for level in range(powers.bit_length() - 1)):
        nbytes = part.message(nonzero * distance / powers, counts * distance / powers)
        yield Exchange("pair", nbytes, distance=distance, times=2)
        yield Work("merge", 2 * nonzero * distance / powers)
    if problem.ranks > powers:
        yield Exchange("tree", part.message(nonzero), distance=powers, receives=False)


def _boundary_sums(problem: Problem, counters: int) -> Iterator[int]:
    """Return how many counts each sum for the boundaries has, for evenly spread entries."""
    yield counters
    boundaries = problem.ranks - 1
    inside = problem.ranks * problem.k / counters
    # Some boundary's cell holds two standard deviations more than the average.
    while inside + 2 * sqrt(inside) > max(problem.ranks, _TOLERANCE, problem.k // _TOLERATED):
        parts = counters // boundaries
        yield boundaries * (parts - 1)
        inside /= parts


def _gathers(problem: Problem) -> bool:
    """Tell whether every stream is gathered: the collective's own comparison of bytes."""
    ranks = problem.ranks
    words = 2 * problem.k * problem.entry_bytes * (ranks - 1) // ranks
    times = (ranks - 1).bit_length() if ranks <= _FEW_RANKS else 2
    counts = 4 * max(1024, 4 * ranks) * (ranks - 1 if ranks <= DIRECT_RANKS else times)
    dense = problem.size * problem.itemsize + HEADER_BYTES + 8
    message = min(dense, HEADER_BYTES + ceil(problem.k * problem.entry_bytes / 8) * 8)
    return (ranks - 1) * message <= words + 3 * HEADER_BYTES * (ranks - 1) + counts
