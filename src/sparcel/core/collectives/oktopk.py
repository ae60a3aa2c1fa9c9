"""The global top-k of the ranks' streams, with a volume that does not grow with their number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from sparcel.core import device, kernels, patterns
from sparcel.core.collectives.all_reduce import reduce_regions
from sparcel.core.collectives.counting import (
    average_boundaries,
    balanced_boundaries,
    counters_for,
    counting_bytes,
    edges_for,
    gather_integers,
    global_topk,
)
from sparcel.core.collectives.gtopk import GlobalTopk, gathered_topk
from sparcel.core.device import finite_flag
from sparcel.core.formats import Expected, Lengths
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire, collective, goes_direct
from sparcel.errors import InputError


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
    start, size = boundaries[wire.rank], boundaries[-1]
    block, rest = selectable(region).topk(counts[wire.rank])
    if evened:
        total = gather_evened(block.placed(start, size), counts, wire)
    else:
        total = gather_direct(block, counts, boundaries, wire)
    return GlobalTopk(total, rest.placed(start, size))


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
class Estimates:
    """Estimates that one call of `oktopk_reuse` makes and later calls use.

    ``boundaries`` are the P+1 boundaries of the regions. ``threshold`` is the smallest magnitude
    that wins; it was chosen so that ``k`` coordinates win. None means unknown.
    """

    boundaries: tuple[int, ...] | None = None
    threshold: float | None = None
    k: int = 0


@collective
def oktopk_reuse(
    stream: SparseStream,
    wire: Wire,
    k: int,
    estimates: Estimates,
    renew_boundaries: bool,
    renew_threshold: bool,
    max_nnz: int | None = None,
) -> tuple[GlobalTopk, Estimates]:
    """Sum over all ranks and keep about k magnitudes, by the paper's own rules.

    Parameters
    ----------
    stream, k, max_nnz
        As for `oktopk`.
    estimates
        The result of an earlier call. This and the next two must be the same on all ranks.
    renew_boundaries, renew_threshold
        Whether to estimate anew. Estimates that are unknown or do not fit this call are always
        renewed: boundaries of other ranks or another size, a threshold of another ``k``.

    Returns
    -------
    The sum, as from `oktopk`, and the estimates for the next call. If the threshold was renewed,
    the total holds k coordinates. Otherwise it holds all magnitudes from the threshold on; if these
    are more than ⌈4k/3⌉, each region keeps its largest, in proportion. If the sum is not finite,
    the estimates are returned unchanged.

    Source: Ok-Topk, Algorithm 1. Boundaries are averaged over the ranks, and blocks are balanced if
    one is above four times the mean. Unlike the paper, this function finds the k-th largest without
    gathering, and caps the number of winners.
    """
    own, boundaries, threshold = selectable(stream), estimates.boundaries, estimates.threshold
    fits = boundaries is not None and (len(boundaries), boundaries[-1]) == (wire.size + 1, own.size)
    if renew_boundaries or boundaries is None or not fits:
        boundaries = tuple(average_boundaries(own, wire.comm))
    region = reduce_regions(own, boundaries, wire, max_nnz=max_nnz)
    if renew_threshold or threshold is None or estimates.k != k:
        winners = global_topk(region.values, wire.comm, k, own.size, region.finite)
        counts, threshold, finite = winners.counts, winners.threshold, winners.finite
    else:
        counts, finite = _count_from(threshold, region, wire)
        counts = _capped(counts, -(-4 * k // 3))
    if not finite:
        return GlobalTopk.void(own), estimates
    evened = wire.size * max(counts) > 4 * sum(counts)
    return gather_winners(region, counts, boundaries, wire, evened), Estimates(
        boundaries, threshold, k
    )


def _count_from(threshold: float, region: SparseStream, wire: Wire) -> tuple[list[int], bool]:
    """Count each rank's magnitudes from the threshold on, and tell whether all are finite."""
    selected, _ = kernels.threshold_select(region.values, threshold)
    finite = device.truth(region.finite & finite_flag(region.values))
    counts, finite = gather_integers(torch.tensor([selected.numel()]), wire.comm, 1, finite)
    return torch.cat(counts).tolist(), finite


def _capped(counts: Sequence[int], cap: int) -> list[int]:
    """Lower counts in proportion, so that they sum to no more than ``cap``."""
    ends = list(accumulate(counts))
    total = ends[-1]
    if total <= cap:
        return list(counts)
    return [high - low for low, high in pairwise([0, *(end * cap // total for end in ends)])]


class Move(NamedTuple):
    """Consecutive entries ``[start, stop)`` that move from rank ``owner`` to rank ``target``.

    The K entries of all ranks are numbered in the order of their indices.
    """

    start: int
    stop: int
    owner: int
    target: int


def moves_to_even(counts: Sequence[int]) -> list[Move]:
    """Return the moves that even out the ranks' entries; afterwards counts differ by at most one.

    Rank r has ``counts[r]`` entries before, which follow those of rank r−1. Afterwards it has the
    entries ``[r·K // P, (r+1)·K // P)``. There are at most 2P moves, many of them from a
    rank to itself.
    """
    ends = list(accumulate(counts))
    targets = patterns.cuts(ends[-1], len(counts))[1:]
    cuts = sorted({0, *ends, *targets})
    return [
        Move(start, stop, bisect_right(ends, start), bisect_right(targets, start))
        for start, stop in pairwise(cuts)
    ]


def evening_pays(lengths: Lengths, counts: Sequence[int], boundaries: Sequence[int]) -> bool:
    """Tell whether evening out saves the worst rank an eighth of its bytes.

    Less would not pay, because evening out takes another exchange.
    """
    direct = direct_volume(lengths, counts, boundaries)
    return 8 * evened_volume(lengths, counts) < 7 * direct


def gather_direct(
    block: SparseStream, counts: Sequence[int], boundaries: Sequence[int], wire: Wire
) -> SparseStream:
    """Gather and join the ranks' blocks, each numbered from the start of its rank's region."""
    expected = [
        Expected.like(block, nnz, stop - start)
        for nnz, (start, stop) in zip(counts, pairwise(boundaries), strict=True)
    ]
    parts = wire.gather(wire.pack_region(block, boundaries[wire.rank]), expected)
    size = boundaries[-1]
    return _join([part.placed(boundaries[rank], size) for rank, part in enumerate(parts)])


def gather_evened(block: SparseStream, counts: Sequence[int], wire: Wire) -> SparseStream:
    """Even out the ranks' blocks, sparse parts of one vector, then gather and join them.

    Source: Ok-Topk, section 3.1.2 (data balancing).
    """
    share = -(-sum(counts) // wire.size)
    block = _even_out(block, moves_to_even(counts), wire)
    expected = [Expected.like(block, share, stays_sparse=True)] * wire.size
    return _join(wire.gather(wire.pack(block), expected))


def _even_out(block: SparseStream, moves: Sequence[Move], wire: Wire) -> SparseStream:
    """Send and receive the entries that move to other ranks."""
    rank = wire.rank
    leaving = [move for move in moves if move.owner == rank]
    parts = {move.target: part for move, part in zip(leaving, _cut(block, leaving), strict=True)}
    coming = {
        move.owner: Expected.like(block, move.stop - move.start, stays_sparse=True)
        for move in moves
        if move.target == rank
    }
    arrived = wire.exchange(
        {target: wire.pack(part) for target, part in parts.items() if target != rank},
        {owner: one for owner, one in coming.items() if owner != rank},
    )
    held = {owner: packet.stream for owner, packet in arrived.items()}
    if rank in coming:
        held[rank] = parts[rank]
    return _join([block.empty_like(), *(held[owner] for owner in coming)])


def _cut(block: SparseStream, moves: Sequence[Move]) -> list[SparseStream]:
    """Cut a sparse stream into consecutive parts; indices stay as they are."""
    assert block.indices is not None, "winners are sparse"
    lengths = [move.stop - move.start for move in moves]
    parts = zip(block.indices.split(lengths), block.values.split(lengths), strict=True)
    return [SparseStream.unchecked(indices, values, block.size) for indices, values in parts]


def _join(parts: Sequence[SparseStream]) -> SparseStream:
    """Join sparse streams of one vector whose indices follow each other."""
    indices = [part.indices for part in parts if part.indices is not None]
    values = torch.cat([part.values for part in parts])
    return SparseStream.unchecked(torch.cat(indices), values, parts[0].size)


def direct_volume(lengths: Lengths, counts: Sequence[int], boundaries: Sequence[int]) -> float:
    """Return the worst rank's volume in `gather_direct` of ``counts`` entries a rank."""
    sizes = [stop - start for start, stop in pairwise(boundaries)]
    traffic = _gather_traffic(list(map(lengths.region_message, counts, sizes)))
    return max(map(max, traffic))


def evened_volume(lengths: Lengths, counts: Sequence[int]) -> float:
    """Return the worst rank's volume in `gather_evened` of ``counts`` entries a rank."""
    cuts = patterns.cuts(sum(counts), len(counts))
    traffic = _gather_traffic([lengths.sparse_message(hi - lo) for lo, hi in pairwise(cuts)])
    for start, stop, owner, target in moves_to_even(counts):
        if owner != target:
            nbytes = lengths.sparse_message(stop - start)
            traffic[owner][0] += nbytes
            traffic[target][1] += nbytes
    return max(map(max, traffic))


def _gather_traffic(blocks: Sequence[float]) -> list[list[float]]:
    """Return what each rank sends and receives in `Wire.gather`; rank r has ``blocks[r]`` bytes."""
    ranks, total = len(blocks), sum(blocks)
    if goes_direct(ranks, max(blocks)):
        return [[(ranks - 1) * block, total - block] for block in blocks]
    before = list(accumulate([*blocks, *blocks], initial=0.0))
    counts = [count for *_, count in patterns.bruck(0, ranks)]
    return [
        [sum(before[rank + count] - before[rank] for count in counts), total - block]
        for rank, block in enumerate(blocks)
    ]
