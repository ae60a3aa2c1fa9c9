"""The global top-k of the ranks' streams, with a volume that does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from sparcel import patterns
from sparcel.collectives._blocks import blocks_stages, evening_pays, gather_blocks
from sparcel.collectives._counts import Counted, counters_for, counting_bytes, equally_counted
from sparcel.collectives._global_topk import few, global_topk, histogram_bits, winners_stages
from sparcel.collectives.gtopk import GlobalTopk, gathered_topk, gathered_topk_stages
from sparcel.collectives.reduce_scatter import reduce_regions
from sparcel.collectives.reduce_scatter import stages as reduce_stages
from sparcel.collectives.regions import (
    TOLERANCE,
    TOLERATED,
    balanced_boundaries,
    boundaries_stages,
    edges_for,
)
from sparcel.comm import DIRECT_RANKS
from sparcel.errors import InputError
from sparcel.formats import Lengths
from sparcel.stages import Problem, Stage, Work, chosen
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective


@collective
def oktopk(stream: SparseStream, wire: Wire, k: int, max_nnz: int | None = None) -> GlobalTopk:
    """Sum over all ranks and keep the k largest magnitudes, exactly unless the format rounds.

    Parameters
    ----------
    stream
        Scalar float values: this rank's selection, at most ``max_nnz`` entries.
    k
        min(k, nonzeros of the sum) coordinates are kept; ties go to the lowest index. ``k`` and
        ``max_nnz`` must be the same on all ranks.

    Returns
    -------
    GlobalTopk
        The total is empty and not ``finite`` if an input or a sum is not finite. A rank drops the
        sums of its own region that do not win.

    If gathering every stream takes no more bytes, as with two ranks or little data, this calls
    `gathered_topk`, which takes fewer rounds, and returns the same bits unless the format rounds.
    Otherwise it calls `topk_by_regions`.
    Source: Ok-Topk, Algorithm 1. Boundaries and threshold are exact, and renewed in every call.
    """
    own = selectable(stream)
    if gathering_is_cheaper(lengths_of(own, wire), wire.size, k, max_nnz):
        return gathered_topk(own, wire, k, max_nnz)
    return topk_by_regions(own, wire, k, max_nnz)


def topk_by_regions(
    own: SparseStream, wire: Wire, k: int, max_nnz: int | None = None
) -> GlobalTopk:
    """Sum over all ranks and keep the k largest, like `oktopk`; ``own`` is sparse.

    There are a split, a balancing if it pays, two gathers, and sums of counts. Words: at most
    2k + 4k(P−1)/P, and a few KB of counts.
    """
    boundaries, finite = balanced_boundaries(own, wire.comm, max_nnz)
    if not finite:
        return GlobalTopk.void(own)
    region = reduce_regions(own, boundaries, wire, max_nnz=max_nnz)
    winners = global_topk(region.values, wire.comm, k, own.size, region.finite)
    if not winners.finite:
        return GlobalTopk.void(own)
    evened = evening_pays(lengths_of(own, wire), winners.counts, boundaries)
    return gather_winners(region, winners.counts, boundaries, wire, evened)


def lengths_of(like: SparseStream, wire: Wire) -> Lengths:
    """Return the lengths of messages about a vector, which all ranks know alike."""
    return Lengths(wire.format, like.size, like.value_bytes)


def gathering_is_cheaper(lengths: Lengths, ranks: int, k: int, max_nnz: int | None) -> bool:
    """Compare the bytes of gathering all streams with the least that regions take.

    All ranks know both. Regions take 4k(P−1)/P words if nothing is balanced, the headers of the
    split and two gathers, and counts of full length for the boundaries and two histograms.
    """
    size, header = lengths.size, lengths.sparse_message(0)
    entries = (size if max_nnz is None else min(max_nnz, size)) + min(k, size)
    least = (lengths.sparse_message(entries) - header) * (ranks - 1) / ranks
    counts = counting_bytes(edges_for(ranks) + 2 * counters_for(ranks), ranks)
    return (ranks - 1) * lengths.most_bytes(max_nnz) <= least + 3 * header * (ranks - 1) + counts


def gather_winners(
    region: SparseStream,
    counts: Sequence[int],
    boundaries: Sequence[int],
    wire: Wire,
    evened: bool,
) -> GlobalTopk:
    """Give every rank the ``counts[rank]`` largest of every rank's region."""
    block, rest = selectable(region).topk(counts[wire.rank])
    total = gather_blocks(block, counts, boundaries, wire, evened)
    return GlobalTopk(total, rest.placed(boundaries[wire.rank], boundaries[-1]))


def check_selectable(stream: SparseStream) -> None:
    """Raise `InputError` unless the largest of a stream's values can be selected."""
    if stream.width is not None or not stream.dtype.is_floating_point:
        raise InputError(
            f"the largest are selected among scalar float values, got {stream}; convert the values,"
            " or sum everything with all_reduce"
        )


def selectable(stream: SparseStream) -> SparseStream:
    """Return the stream itself, or the nonzero coordinates of a dense one."""
    check_selectable(stream)
    return stream.largest(stream.size) if stream.is_dense else stream


@dataclass(frozen=True)
class DataFacts:
    """The data-dependent facts that decide the bytes of `topk_by_regions`.

    Attributes
    ----------
    boundary_sums, histograms
        The counts that were summed to find the boundaries, and the k-th largest magnitude.
    boundaries
        The P+1 boundaries of the regions.
    listed
        How many integers each rank sent in the gather of candidates.
    winners
        How many of the k largest each rank holds.
    """

    boundary_sums: Sequence[Counted]
    boundaries: Sequence[int]
    histograms: Sequence[Counted]
    listed: Sequence[int]
    winners: Sequence[int]


def stages(problem: Problem, facts: DataFacts | None = None) -> Iterator[Stage]:
    """Yield the stages of `oktopk` with these ``facts``, or with those expected."""
    k = problem.k
    if gathering_is_cheaper(problem.lengths, problem.ranks, k, k):
        yield from gathered_topk_stages(problem)
    else:
        yield from by_regions_stages(problem, facts or expected_facts(problem))


def by_regions_stages(problem: Problem, facts: DataFacts) -> Iterator[Stage]:
    """Yield the stages of `topk_by_regions`."""
    reduced = problem.entries(problem.everyone) / problem.ranks
    yield Work("small", COUNTING_OPERATIONS)
    yield from boundaries_stages(problem, facts.boundary_sums)
    yield from reduce_stages(problem, facts.boundaries)
    yield from winners_stages(problem, reduced, facts.histograms, facts.listed)
    yield chosen(reduced)
    yield Work("select", reduced)
    yield from blocks_stages(problem, facts.winners, facts.boundaries)


COUNTING_OPERATIONS = 1000
"""Small operations on counts: to find boundaries, to share out winners, and to compare costs. Their
number is fitted to measured times."""

_OCTAVES = 5
"""Assumed number of octaves that sums lie in."""


def expected_facts(problem: Problem) -> DataFacts:
    """Return the facts expected if entries are spread evenly and sums lie in a few octaves."""
    ranks, k = problem.ranks, problem.k
    cuts = edges_for(ranks)
    sums = [equally_counted(cuts, cuts, ranks)]
    inside = ranks * k / cuts
    # Assume that some boundary's cell is two standard deviations above the average.
    while ranks > 1 and inside + 2 * sqrt(inside) > max(ranks, TOLERANCE, k // TOLERATED):
        parts = cuts // (ranks - 1)
        edges = (ranks - 1) * (parts - 1)
        sums.append(equally_counted(edges, edges, ranks))
        inside /= parts
    first, more = histogram_bits(ranks)
    bins = _OCTAVES << (first - 8)
    histograms = [equally_counted(1 << first, bins, ranks)]
    inside = problem.entries(problem.everyone) / bins
    while inside > few(ranks):
        bins, own = 1 << more, inside / ranks
        # Few ranks send all counts from the first nonzero one to the last.
        occupied = bins * own / (own + 2) if ranks <= DIRECT_RANKS else min(bins, own)
        histograms.append(equally_counted(bins, occupied, ranks))
        inside /= bins
    listed = [2 + round(inside / ranks)] * ranks
    winners = [high - low for low, high in pairwise(patterns.regions(k, ranks))]
    return DataFacts(sums, problem.regions, histograms, listed, winners)
